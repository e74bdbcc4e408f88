"""`transformers.TrainingArguments`, on echelon's ranks: the same dataclass; `init_from_env` gives device and ranks."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from echelon.common.errors import UsageError, require
from echelon.compat.transformers.absent import check_arguments
from echelon.compat.transformers.unit import clip_of
from echelon.contracts.rank import RankInfo
from echelon.parallel.ddp.ddp import DDPStrategy
from echelon.parallel.recipe.compilation import TorchCompileParams
from echelon.parallel.strategy import Strategy
from echelon.world import agree
from echelon.world.init import World, init_from_env

__all__ = ["TrainingArguments"]

# Options of DeepSpeed that change its speed or what it prints, not the training.
_FREE = {"steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
_OFFLOADS = ("offload_optimizer", "offload_param")
_TIMEOUT_S = 1800  # transformers' default; echelon's own timeout is used instead


@dataclass(repr=False)
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """transformers' arguments, by their names and with their defaults.

    Args:
        strategy: echelon's, or its name: "ddp" (by default, with several ranks), "fsdp", "hsdp", "zero1", "zero2", "zero3".
        deepspeed: a DeepSpeed configuration, whose ZeRO stage becomes the strategy; refused if it asks for more.
        overwrite_output_dir: set checkpoints of another run in `output_dir` aside; otherwise they are an error.
        evaluation_strategy, no_cuda, warmup_ratio: older names, as in transformers 4.
        logging_dir, save_safetensors, group_by_length: of transformers 4. The first two have no effect, the last is refused.
    Raises:
        UsageError: an argument is not supported; the message says what to write instead.
    """

    strategy: str | None = None
    overwrite_output_dir: bool = False
    evaluation_strategy: str | None = None
    no_cuda: bool = False
    warmup_ratio: float | None = None
    logging_dir: str | None = None
    save_safetensors: bool | None = None
    group_by_length: bool = False

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.evaluation_strategy is not None:
            self.eval_strategy = self.evaluation_strategy
        if self.warmup_ratio is not None:
            require(0 <= self.warmup_ratio <= 1, "warmup_ratio", "between 0 and 1", self.warmup_ratio)
            given: float = vars(self)["warmup_steps"]  # has precedence, as in transformers 4
            self.warmup_steps = given or min(self.warmup_ratio, 1 - 1e-9)
        if self.no_cuda:
            self.use_cpu = True
        self.report_to = vars(self)["report_to"] or "none"
        configuration, self.deepspeed = vars(self)["deepspeed"], None  # otherwise transformers would set up DeepSpeed
        super().__post_init__()
        if (stage := _stage_of(configuration, self)) is not None:
            self.strategy = stage

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, with the strategy as text so that it can be logged."""
        arguments: dict[str, Any] = super().to_dict()
        return {**arguments, "strategy": str(self.strategy) if self.strategy is not None else None}

    # --- echelon's device and ranks instead of Accelerate's

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        self.distributed_state, self._n_gpu = None, 1
        own: dict[str, Any] = {} if self.ddp_timeout == _TIMEOUT_S else {"timeout": timedelta(seconds=self.ddp_timeout)}
        return init_from_env("cpu" if self.use_cpu else None, self.ddp_backend, **own)

    @property
    def n_gpu(self) -> int:
        return 1

    @property
    def world_size(self) -> int:
        return World.current(torch.device("cpu")).size

    @property
    def process_index(self) -> int:
        return World.current(torch.device("cpu")).rank

    @property
    def local_process_index(self) -> int:
        return RankInfo.from_env().local_rank if self.world_size > 1 else 0

    @property
    def parallel_mode(self) -> Any:
        modes = transformers.training_args.ParallelMode
        return modes.DISTRIBUTED if self.world_size > 1 else modes.NOT_PARALLEL

    @contextlib.contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Context that the first rank of each machine runs before the others; with `local=False`, rank 0. Collective."""
        first = self.local_process_index == 0 if local else self.process_index == 0
        if agree.is_joined() and not first:
            dist.barrier(group=agree.control_group())
        try:
            yield
        finally:
            if agree.is_joined() and first:
                dist.barrier(group=agree.control_group())

    # --- options of the unit

    def unit_options(self, model: torch.nn.Module) -> dict[str, Any]:
        """AutoOptions of the unit."""
        compiled = None
        if self.torch_compile:
            compiled = TorchCompileParams(backend=self.torch_compile_backend, mode=self.torch_compile_mode)
        recomputes = self._recomputes and not recomputes_itself(model, self._recompute_options)
        return {
            "device": self.device,
            "layout": self._strategy_for(model),
            "precision": "bf16" if self.bf16 else "fp16" if self.fp16 else None,
            "accumulate": self.gradient_accumulation_steps,
            "clip_grad_norm": clip_of(self),
            "compile": compiled,
            "recompute": "blocks" if recomputes else None,
        }

    @property
    def _recomputes(self) -> bool:
        return bool(getattr(self, "activation_checkpointing", False) or self.gradient_checkpointing)  # newer and older name

    @property
    def _recompute_options(self) -> Any:
        return getattr(self, "activation_checkpointing_kwargs", None) or self.gradient_checkpointing_kwargs

    def _strategy_for(self, model: torch.nn.Module) -> Strategy | str | None:
        given: Any = self.strategy
        if given not in (None, "ddp") or self.world_size == 1:
            return given  # type: ignore[no-any-return]
        unused = self.ddp_find_unused_parameters
        if unused is None:  # transformers' default: DDP cannot search a recomputed graph
            unused = not self._recomputes
        return DDPStrategy(
            find_unused_parameters=unused,
            bucket_cap_mb=self.ddp_bucket_cap_mb,
            broadcast_buffers=True if self.ddp_broadcast_buffers is None else self.ddp_broadcast_buffers,
            static_graph=bool(self.ddp_static_graph),
        )


def _stage_of(given: Any, args: Any) -> str | None:
    """The strategy for a DeepSpeed configuration that only asks for a ZeRO stage; other options are refused by name.

    Args:
        given: the configuration, or the path of its file.
        args: TrainingArguments; the configuration's values must be the same or "auto".
    Raises:
        UsageError: on every rank: the configuration asks for something else, or cannot be read.
    """
    if not given:
        return None
    try:
        config = dict(given) if isinstance(given, Mapping) else json.loads(Path(given).read_text())
        zero = dict(config.pop("zero_optimization", {}))
        stage = zero.get("stage", 0)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _refused(f"deepspeed must be a configuration of DeepSpeed or a file of JSON, got {given!r} ({error})") from None
    if args.strategy is not None:
        raise _refused(f"strategy={args.strategy!r} is given, too")
    if stage not in (0, 1, 2, 3):
        raise _refused(f"zero_optimization.stage is {stage!r}")
    for name in _OFFLOADS:
        if (zero.get(name) or {}).get("device", "none") != "none":
            raise _refused(f"it has zero_optimization.{name}", "strategy=FSDPStrategy(cpu_offload=True), or leave it out")
    rate = args.gradient_accumulation_steps
    same = {
        "gradient_accumulation_steps": rate,
        "gradient_clipping": args.max_grad_norm,
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "train_batch_size": args.per_device_train_batch_size * rate * args.world_size,
    }
    on = {"fp16": args.fp16, "bf16": args.bf16, "bfloat16": args.bf16}
    for name, value in config.items():
        if name in same:
            fits = value in ("auto", same[name])
        elif name in on:
            fits = value.get("enabled", False) in ("auto", on[name])
        elif name == "optimizer":
            fits = value.get("type") in ("Adam", "AdamW") and set(value.get("params", {}).values()) <= {"auto"}
        else:
            fits = name in _FREE
        if not fits:
            also = f", where the arguments have {(same | on)[name]!r}" if name in same | on else ""
            raise _refused(f"it has {name}={value!r}{also}")
    return ("ddp", "zero1", "zero2", "zero3")[stage]


def _refused(why: str, instead: str = 'strategy="zero1", "zero2" or "zero3", and the other values as arguments') -> UsageError:
    return UsageError(f"TrainingArguments(deepspeed=...): {why}. Instead: {instead}.")


def recomputes_itself(model: Any, options: Any) -> bool:
    """Turn on a transformers model's own activation checkpointing; False for a model without it."""
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if (enable := getattr(model, name, None)) is None:
            continue
        given = dict(options or {})
        more = {key: given.pop(key) for key in ("every_n_layers", "offload") if key in given}
        enable(given or None, **more)
        return True
    return False


def __getattr__(name: str) -> Any:
    """Other names of `transformers.training_args`, such as ParallelMode."""
    return getattr(transformers.training_args, name)
