"""The older FullyShardedDataParallel by hand."""

from __future__ import annotations

import functools

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from common import Own, device, ech, loader, model

policy = functools.partial(size_based_auto_wrap_policy, min_num_params=100)
ech.train(Own(FullyShardedDataParallel(model(), auto_wrap_policy=policy, device_id=device)), loader(), max_epochs=3)
