"""Options of torch's older classes that echelon does not use.

They are accepted where TorchTNT and Lightning have them, and log it if they have no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from echelon.common.errors import UsageError
from echelon.parallel.fsdp import fsdp
from echelon.parallel.recipe import activation
from echelon.world import agree

__all__ = ["ActivationCheckpointParams", "FSDPStrategy"]

logger = logging.getLogger(__name__)


class FSDPStrategy(fsdp.FSDPStrategy):
    """`echelon.FSDPStrategy` that also takes the options of the older FullyShardedDataParallel.

    Args:
        backward_prefetch: always BACKWARD_PRE: the next block is gathered while the current one computes.
        limit_all_gathers: `fully_shard` always limits them; False is refused.
        use_orig_params: parameters are always the module's own.
        state_dict_type, state_dict_config, optim_state_dict_config: checkpoints are always sharded, by name.
        options: `echelon.FSDPStrategy`'s; its documentation also describes the other arguments.
    """

    def __init__(
        self,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        *,
        backward_prefetch: Any = "BACKWARD_PRE",
        limit_all_gathers: bool = True,
        use_orig_params: bool | None = None,
        state_dict_type: object | None = None,
        state_dict_config: object | None = None,
        optim_state_dict_config: object | None = None,
        **options: Any,
    ) -> None:
        super().__init__(process_group, sharding_strategy, cpu_offload, auto_wrap_policy, **options)
        if not limit_all_gathers:
            raise UsageError("FSDPStrategy: limit_all_gathers must be True, got False. fully_shard always limits them.")
        if not agree.is_rank0():
            return
        if getattr(backward_prefetch, "name", backward_prefetch) != "BACKWARD_PRE":
            logger.warning("FSDPStrategy(backward_prefetch=...) has no effect: fully_shard prefetches as BACKWARD_PRE does")
        if use_orig_params is False:
            logger.info("FSDPStrategy(use_orig_params=False) has no effect: parameters are always the module's own")
        states = {
            "state_dict_type": state_dict_type,
            "state_dict_config": state_dict_config,
            "optim_state_dict_config": optim_state_dict_config,
        }
        for name, value in states.items():
            if value is not None:
                logger.warning("FSDPStrategy(%s=...) has no effect: checkpoints are always sharded and keyed by name", name)


class ActivationCheckpointParams(activation.ActivationCheckpointParams):
    """`echelon.layouts.ActivationCheckpointParams`, with TorchTNT's first argument.

    Args:
        checkpoint_impl: has no effect: recomputation is always the non-reentrant kind.
        options: `echelon.layouts.ActivationCheckpointParams`'s.
    """

    def __init__(
        self,
        checkpoint_impl: object | None = None,
        check_fn: Callable[[nn.Module], bool] | None = None,
        auto_wrap_policy: Any = None,
        context_fn: Any = None,
        **options: Any,
    ) -> None:
        check_fn = None if auto_wrap_policy is not None else check_fn  # the policy has precedence, as in TorchTNT
        super().__init__(check_fn=check_fn, auto_wrap_policy=auto_wrap_policy, context_fn=context_fn, **options)

    def chosen(self, module: nn.Module) -> list[nn.Module]:
        """Without a choice, recompute everything, as TorchTNT does: by block, or by child if the model has no blocks."""
        asked = self.check_fn is not None or self.auto_wrap_policy is not None
        return super().chosen(module) or ([] if asked else list(module.children()) or [module])
