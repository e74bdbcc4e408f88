"""A bad argument is refused where it is given, by its name, before anything is started. No rank runs here."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.callbacks import EarlyStopping, GarbageCollector, LearningRateMonitor, PyTorchProfiler
from echelon.common.errors import EchelonError, LaunchError, UsageError
from echelon.compat.torchtnt.utils.prepare_module import FSDP2Strategy
from echelon.launcher.calls import Call, pack
from echelon.loop.callbacks.early_stopping import EarlyStopChecker
from echelon.observe.loggers import CSVLogger
from tests.kit.refusals import refused
from tests.kit.units import Regression

DATA = [torch.ones(2, 2)] * 4
NAN = math.nan
Saver = ech.DistributedCheckpointSaver
unit = Regression
linear = partial(nn.Linear, 1, 1)
cpu = torch.device("cpu")


def trainer(**options: Any) -> ech.Trainer:
    return ech.Trainer(2, **{"max_epochs": 1, **options})


def group(**options: Any) -> Any:
    return ech.launching.CollectiveGroup(abs, **options)


def fp16(**options: Any) -> ech.layouts.Precision:
    return ech.layouts.Precision(torch.float16, **options)


# What is called, with what, and what must be said of it; of most "<the parameter> must be <this>".
ROWS: list[tuple[Callable[..., Any], Any, str]] = [
    # --- AutoUnit
    (unit, {"module": 3}, "a torch.nn.Module, got 3"),
    (unit, {"module": nn.Linear}, r"a torch.nn.Module, got <class .*Write Linear\(...\)"),
    (unit, {"device": "nope"}, "a torch.device or None, got 'nope'"),
    (unit, {"layout": 3}, "layout must be one of 'none', .*got 3"),
    (unit, {"precision": 16}, "'fp32', .*got 16"),
    (unit, {"clip_grad_norm": "a"}, "above 0, or None for no clipping, got 'a'"),
    (unit, {"clip_grad_norm": NAN}, "above 0, or None for no clipping, got nan"),
    (unit, {"clip_grad_norm": True}, "above 0, or None for no clipping, got True"),
    (unit, {"clip_grad_value": [1]}, r"above 0, or None for no clipping, got \[1\]"),
    (unit, {"ema": "a"}, "a decay from 0 to below 1, such as 0.999, or SWAParams.*got 'a'"),
    (unit, {"ema": 1}, "a decay from 0 to below 1.*got 1"),
    (unit, {"ema": True}, "a decay from 0 to below 1.*got True"),
    (unit, {"options": {"training": False}}, r"UnitOptions\(...\) or None, got {"),
    (ech.UnitOptions, {"averaging": 3}, r"SWAParams\(...\) or None, got 3"),
    (ech.UnitOptions, {"averaging": ech.units.SWAParams}, r"SWAParams\(...\) or None, got <class"),
    (unit, {"compile": 3}, r"'blocks', True, False or TorchCompileParams\(...\), got 3"),
    (unit, {"recompute": True}, "'none', 'blocks', 'selective' or Activ.*, got True"),
    (ech.UnitOptions, {"training": "no"}, "True or False, got 'no'"),
    (ech.UnitOptions, {"detect_anomaly": "no"}, "True or False, got 'no'"),
    (ech.UnitOptions, {"prefetch": 3}, "True or False, got 3"),
    (unit, {"accumulate": True}, "a whole number of at least 1, or None for the loader's, got True"),
    (unit, {"accumulate": 0}, "a whole number of at least 1, or None for the loader's, got 0"),
    (unit, {"clip_grad_norm": 0.0}, "above 0, or None for no clipping, got 0.0"),
    (ech.UnitOptions, {"clip_grad_value": -1.0}, "above 0, or None for no clipping, got -1.0"),
    (unit, {"layout": "ddpp"}, "one of 'none', .*got 'ddpp'. Is it 'ddp'"),
    (unit, {"layout": ["ddp"]}, r"one of 'none', .*got \['ddp'\]"),
    (unit, {"precision": "fp8"}, "'fp32', 'bf16', 'fp16', 'float8', .*, got 'fp8'"),
    (unit, {"precision": torch.float64}, ".*, got torch.float64"),
    (ech.UnitOptions, {"lr_interval": "batch"}, "'update' or 'epoch', got 'batch'"),
    (ech.UnitOptions, {"deterministic": True}, "'bitwise' or None, got True"),
    (ech.UnitOptions, {"stop_after_nonfinite_losses": 0}, "a whole number of at least 1, or None to go on regardless, got 0"),
    (lambda: unit(compile=True, torch_compile_params=True), {}, "which are the same. Give compile alone"),
    (ech.units.AutoPredictUnit, {"module": None}, "a torch.nn.Module, got None"),
    (ech.UnitOptions, {"device": 3}, "a torch.device or None, got 3"),
    # --- the entry points
    (lambda timer: ech.train(unit(), DATA, max_epochs=1, timer=timer), {"timer": 3}, r"an object whose time\(name\) .*got 3"),
    (lambda timer: ech.fit(unit(), DATA, DATA, max_epochs=1, timer=timer), {"timer": "x"}, "an object whose time.*got 'x'"),
    (lambda timer: ech.predict(unit(), DATA, timer=timer), {"timer": 3}, "an object whose time.*got 3"),
    (lambda: ech.train(unit(), "abc", max_epochs=1), {}, r"the dataloader of train\(\) must be an iterable .*got str"),  # type: ignore[arg-type]
    # --- the saver and what it is given
    (Saver, {"dirpath": 3}, "a folder's path, or a URL .*got 3"),
    (Saver, {"dirpath": None}, "a folder's path, or a URL .*got None"),
    (Saver, {"dirpath": ""}, "a folder's path, or a URL .*got ''"),
    (partial(Saver, "d"), {"process_group": 3}, "None or a group of all ranks, got 3"),
    (partial(Saver, "d"), {"async_checkpoint": "no"}, "True or False, got 'no'"),
    (ech.callbacks.SaveOptions, {"only_trained": "no"}, "True or False, got 'no'"),
    (ech.callbacks.RestoreOptions, {"strict": "no"}, "True or False, got 'no'"),
    (ech.callbacks.RestoreOptions, {"allow_changes": "global_batch"}, "a list of names, got 'global_batch'"),
    (ech.callbacks.RestoreOptions, {"rename": {1: 2}}, "a dict from names .*got {1: 2}"),
    (ech.callbacks.BestCheckpointConfig, {"monitored_metric": 3}, "the name of an attribute of the unit, got 3"),
    (lambda path: Saver.restore(path, unit()), {"path": 3}, "a folder's path, .*got 3"),
    (lambda path: Saver.restore(path, "nowhere"), {"path": [1]}, r"a folder's path, .*got \[1\]"),  # type: ignore[arg-type]
    (partial(Saver.restore, "nowhere"), {"unit": 3}, "a unit such as an AutoUnit, got 3"),
    (partial(Saver.restore_from_latest, "nowhere"), {"unit": unit}, "a unit such as an AutoUnit, got <class"),
    (lambda **given: Saver.restore_from_latest("nowhere", unit(), **given), {"restore_options": 3}, r"RestoreOptions\(...\)"),
    # --- the Trainer
    (trainer, {"callbacks": 3}, "a list, got int"),
    (trainer, {"callbacks": ech.Callback}, "a list, got Callback"),
    (trainer, {"accelerator": ["cpu"]}, "'auto', 'cpu' or 'gpu', got"),
    (trainer, {"max_epochs": "a"}, "a whole number of at least 0, .*got 'a'"),
    (trainer, {"max_updates": -1}, "a whole number of at least 0, .*got -1"),
    (
        lambda limit: trainer(max_steps_per_epoch={"train": limit}),
        {"limit": "a"},
        "max_steps_per_epoch must be a whole number",
    ),
    (trainer, {"evaluate_every_n_epochs": 0}, "a whole number of at least 1, .*got 0"),
    (trainer, {"unit_options": {"clip_grad_norm": "a"}}, "clip_grad_norm must be above 0"),
    (trainer, {"unit_options": {"precision": 3}}, "precision must be 'fp32'"),
    (trainer, {"run_dir": 3}, "a folder or None, got 3"),
    (
        trainer,
        {"precision": "bf16"},
        r"Trainer has no argument 'precision'\. Give it to the unit, or as unit_options={'precision': ",
    ),
    (trainer, {"max_epoch": 3}, r"Trainer has no argument 'max_epoch'\. Is it max_epochs\?"),
    (lambda unit: trainer().fit(unit, DATA), {"unit": 3}, "an AutoUnit, or a function that builds a unit, got int"),
    (lambda: trainer().fit(DATA, unit()), {}, "got list. The unit comes first, then the loader"),  # type: ignore[arg-type]
    (lambda: trainer().fit(unit(), 3), {}, r"the dataloader of fit\(\) must be an iterable of batches, got int"),  # type: ignore[arg-type]
    (lambda: trainer(max_epochs=None).fit(unit(), DATA), {}, r"fit\(\) needs max_epochs or max_updates"),
    (lambda ckpt_path: trainer().fit(unit(), DATA, ckpt_path=ckpt_path), {"ckpt_path": 3}, "a checkpoint, 'last' or None, got 3"),
    (lambda: ech.Trainer(1, max_epochs=1).fit(lambda: 3, DATA), {}, "a function that returns a unit, .*returned int"),  # type: ignore[arg-type,return-value]
    # --- functions on ranks
    (ech.launch, {"fn": 3}, "a function, got 3"),
    (ech.launching.spawn, {"fn": "x"}, "a function, got 'x'"),
    (partial(ech.launch, abs), {"ranks": True}, "at least 1, .*got True"),
    (partial(ech.launch, abs), {"ranks": 10**9}, "at most .* on this machine"),
    (partial(ech.launch, abs), {"args": 3}, "a list or tuple of arguments, got 3"),
    (partial(ech.launch, abs), {"args": "ab"}, "a list or tuple of arguments, got 'ab'"),
    (partial(ech.launch, abs), {"kwargs": 3}, "a dict by names, or None, got 3"),
    (partial(ech.launch, abs), {"max_restarts": -1}, "a whole number of at least 0, got -1"),
    (partial(ech.launch, abs), {"timeout_s": NAN}, "above 0 seconds, .*got nan"),
    (partial(ech.launch, abs), {"env": 3}, "a dict from names of variables to strings, got 3"),
    (partial(ech.launch, abs), {"run_dir": 3}, "a folder or None, got 3"),
    (partial(ech.launch, abs), {"quiet": "no"}, "True or False, got 'no'"),
    (group, {"training_args": 3}, "a list or tuple of arguments, got 3"),
    (group, {"training_kwargs": 3}, "a dict by names, or None, got 3"),
    (group, {"policies": ech.launching.Policy()}, r"a list of Policy\(...\), got Policy"),
    (group, {"policies": [3]}, r"a list of Policy\(...\), got \[3\]"),
    (group, {"port": "a"}, "between 1 and 65535, .*got 'a'"),
    (group, {"nprocs": 0}, "a whole number of at least 1, got 0"),
    (group, {"hide_stderr": "no"}, "True or False, got 'no'"),
    (ech.launching.System().cpu_policies, {"n": 2.5}, "a whole number of at least 1, got 2.5"),
    (ech.launching.Policy, {"cpu_affinity": "01"}, "a list of numbers of at least 0, got '01'"),
    (ech.slurm_fn, {"function": 3}, "a function, got 3"),
    (ech.SlurmConfig, {"partition": 3}, "a string, got 3"),
    (ech.SlurmConfig, {"output_folder": 3}, "the path of a folder, got 3"),
    (ech.SlurmConfig, {"extra_params_kwargs": 3}, "a dict by names, .*got 3"),
    (ech.SlurmConfig, {"pack_code": "no"}, "True or False, got 'no'"),
    (partial(ech.prove, make_data=lambda: DATA), {"make_unit": 3}, "a function that builds the unit, got 3"),
    (partial(ech.prove, unit), {"make_data": DATA}, "a function that builds the loader, got"),
    (partial(ech.prove, unit, lambda: DATA), {"updates": "a"}, "a whole number of at least 1, got 'a'"),
    (partial(ech.prove, unit, lambda: DATA), {"timeout_s": "a"}, "above 0 seconds, got 'a'"),
    # --- data
    (partial(ech.Loader, DATA, 2), {"seed": "a"}, "a whole number, got 'a'"),
    (partial(ech.Loader, DATA, 2), {"shuffle": "no"}, "True or False, got 'no'"),
    (partial(ech.Loader, DATA, 2), {"accumulate": True}, "a whole number of at least 1, got True"),
    (partial(ech.Loader, DATA, 2), {"num_workers": 1.5}, "a whole number of at least 0, got 1.5"),
    (partial(ech.Loader, DATA, 2), {"collate_fn": 3}, "a function of a list of samples, or None, got 3"),
    (partial(ech.Loader, DATA, 2), {"pin_memory": "no"}, "True or False, got 'no'"),
    (partial(ech.Loader, global_batch=2), {"dataset": {"train": DATA}}, "map-style, .*got dict of 'train'. Choose one of them"),
    (partial(ech.Loader, global_batch=2), {"dataset": "data.bin"}, "map-style, .*got str"),
    (partial(ech.Loader, DATA, 2), {"options": 3}, r"LoaderOptions\(...\) or None, got 3"),
    (ech.data.LoaderOptions, {"dp": 3}, r"a pair \(dp_rank, dp_size\), or None, got 3"),
    (ech.data.LoaderOptions, {"dp": (2, 2)}, r"a pair .*the first below the second, got \(2, 2\)"),
    (ech.data.LoaderOptions, {"dp": (0, "a")}, "dp_size must be a whole number of at least 1, got 'a'"),
    (ech.data.LoaderOptions, {"timeout_s": None}, "above 0 seconds, got None"),
    (ech.data.LoaderOptions, {"accept_changes": None}, "a collection of names .*got None"),
    (partial(ech.StreamLoader, global_batch=2), {"dataset": list}, "iterable, got type"),
    (
        partial(ech.StreamLoader, DATA, 2),
        {"options": ech.data.LoaderOptions()},
        r"StreamOptions\(...\) or None, got LoaderOptions",
    ),
    (partial(ech.Loader, DATA, 2), {"options": ech.data.StreamOptions()}, r"LoaderOptions\(...\) or None, got StreamOptions"),
    (partial(ech.data.Weighted, DATA), {"weights": "abc"}, "numbers, one for each sample, got str"),
    (partial(ech.data.Weighted, DATA, [1] * 4), {"samples_per_epoch": 2.5}, "a whole number of at least 1, got 2.5"),
    (partial(ech.data.Weighted, weights=[1]), {"dataset": 3}, "map-style, .*got 3"),
    (partial(ech.Mixture, ratios={"a": 1}), {"datasets": [DATA]}, "a dict by the datasets' names, got"),
    (lambda: ech.Mixture({"a": 3}, {"a": 1}), {}, r"datasets\['a'\] must be map-style, .*got 3"),
    (partial(ech.Packed, length=2), {"documents": 3}, "Tokens, or a list of documents, .*got 3"),
    (partial(ech.Packed, length=2), {"documents": "abc"}, "Tokens, or a list of documents, .*got 'abc'"),
    (partial(ech.Packed, [[1, 2]]), {"length": 1.5}, "a whole number, got 1.5"),
    (partial(ech.data.ByteText, context=2), {"files": "a.txt"}, "a list of paths, got 'a.txt'"),
    (ech.Tokens, {"path": None}, "a file, got None"),
    (partial(ech.data.write_tokens, "tokens.bin"), {"documents": 3}, "a list of documents, .*got 3"),
    (partial(ech.data.TokenWriter, "tokens.bin"), {"dtype": "x"}, "uint16 or uint32, got 'x'"),
    # --- layouts and what happens to a module besides
    (ech.DDPStrategy, {"find_unused_parameters": "no"}, "True or False, got 'no'"),
    (ech.DDPStrategy, {"bucket_cap_mb": "a"}, "a number of MiB, .*got 'a'"),
    (ech.DDPStrategy, {"device_ids": 3}, "a list or None, got 3"),
    (ech.FSDPStrategy, {"ignored_modules": 3}, "a list of modules, got 3"),
    (
        ech.FSDPStrategy,
        {"reshard_after_forward": {"blocks.*": None}},
        "True, False, a number of ranks, a dict of these by names, or None, got {'blocks.*': None}",
    ),
    (
        ech.FSDPStrategy,
        {"reshard_after_forward": "no"},
        "True, False, a number of ranks, a dict of these by names, or None, got 'no'",
    ),
    (ech.FSDPStrategy, {"sync_module_states": "no"}, "True or False, got 'no'"),
    (ech.FSDPStrategy, {"forward_prefetch": "no"}, "a whole number of at least 0, got 'no'"),
    (ech.FSDPStrategy, {"backward_prefetch": 0}, "a whole number of at least 1, or None for what fully_shard does, got 0"),
    (ech.layouts.LocalSGDStrategy, {"every": 0}, "a whole number of at least 1, got 0"),
    (ech.layouts.DiLoCoStrategy, {"outer_optimizer": "SGD"}, "a function of a list of parameters, or None, got 'SGD'"),
    (FSDP2Strategy, {"shard_predicates": [3]}, r"a list of functions .*got \[3\]"),
    (FSDP2Strategy, {"modules_to_shard": 3}, "'all', or a list of names or classes, got 3"),
    (ech.Layout, {"dp_shard": "a"}, "a whole number of at least -1, got 'a'"),
    (ech.Layout, {"cp": -2}, "a whole number of at least -1, got -2"),
    (ech.Layout, {"pp": 1.5}, "a whole number of at least -1, got 1.5"),
    (ech.Layout, {"ep": -1}, "a whole number of at least 1, got -1"),
    (lambda tp: ech.Layout(tp=tp).dims(4), {"tp": 0}, "at least 1, or -1 for what the other axes leave, got 0"),
    (ech.Layout, {"schedule": "gpip"}, "one of 'gpipe', '1f1b', .*, got 'gpip'"),
    (ech.Layout, {"stages": "blocks.1"}, "the names of the modules at which further stages begin, .*, got 'blocks.1'"),
    (ech.Layout, {"plan": "colwise"}, "a dict from names of layers to styles, .*got 'colwise'"),
    (ech.layouts.ZeROStrategy, {"stage": True}, "1 .optimizer state., .*got True"),
    (ech.layouts.DPStrategy, {"device_ids": 3}, "a list of CUDA devices, got 3"),
    (fp16, {"init_scale": "a"}, "above 0, got 'a'"),
    (fp16, {"growth_interval": 2.5}, "a whole number of at least 1, got 2.5"),
    (fp16, {"init_scale": 0}, "above 0, got 0"),
    (fp16, {"growth_factor": 0.5}, "above 1, got 0.5"),
    (ech.layouts.Precision, {"dtype": torch.float64}, "torch.float16, torch.bfloat16, or None for float32, got torch.float64"),
    (lambda: ech.layouts.Precision(float8=ech.layouts.Float8()), {}, r"float8 must go with dtype=torch\.bfloat16"),
    (partial(ech.layouts.Precision, torch.bfloat16), {"float8": "rowwise"}, r"Float8\(...\) or None, got 'rowwise'"),
    (ech.layouts.Float8, {"recipe": "columnwise"}, "'rowwise' or 'tensorwise', got 'columnwise'"),
    (lambda: ech.layouts.Float8(enable_fsdp_float8_all_gather=True), {}, "one scale for each tensor. Set recipe='tensorwise'"),
    (ech.layouts.ActivationCheckpointParams, {"memory_budget": 2}, "from 0 to 1, got 2"),
    (partial(ech.layouts.ActivationCheckpointParams, every=2), {"memory_budget": 0.5}, "the only option"),
    (
        lambda: ech.layouts.TorchCompileParams(blocks=True, recursive_module_types=["Linear"]),
        {},
        "blocks and recursive_module_types both choose what is compiled",
    ),
    (ech.layouts.ActivationCheckpointParams, {"every": 1.5}, "a whole number of at least 1, got 1.5"),
    (ech.layouts.ActivationCheckpointParams, {"check_fn": 3}, "a function or None, got 3"),
    (ech.layouts.ActivationCheckpointParams, {"save_ops": 3}, "a list of operators .*got 3"),
    (ech.layouts.TorchCompileParams, {"recursive_module_types": "Linear"}, "a list of classes or their names, got 'Linear'"),
    (partial(ech.units.SWAParams, step_or_epoch_update_freq=1), {"warmup_steps_or_epochs": "a"}, "a whole number of at least 0"),
    (partial(ech.units.SWAParams, 1, 1), {"ema_decay": NAN}, "between 0 and 1, got nan"),
    (partial(ech.units.SWAParams, 1, 1), {"averaging_method": "mean"}, "'ema' or 'swa', got 'mean'"),
    (partial(ech.units.SWAParams, 1, 1, use_lit=True), {"averaging_method": "swa"}, "'ema' if use_lit is set, got 'swa'"),
    (partial(ech.units.SWAParams, 1, 1), {"swalr_params": 3}, r"SWALRParams\(...\) or None, got 3"),
    (partial(ech.units.SWALRParams, 1), {"swa_lrs": "a"}, "a rate of at least 0, .*got 'a'"),
    (partial(ech.layouts.prepare_ddp, linear()), {"device": "cpu"}, "a torch.device, got 'cpu'"),
    (partial(ech.layouts.prepare_fsdp, device=cpu), {"module": 3}, "a torch.nn.Module, got 3"),
    (partial(ech.layouts.data_axes, linear()), {"mesh": "dp"}, "a DeviceMesh, got 'dp'"),
    (ech.nn.checkpoint_wrapper, {"module": 3}, "a torch.nn.Module, got 3"),
    (partial(ech.save_pretrained, folder="x"), {"model": 3}, "a unit or a torch.nn.Module, got 3"),
    # --- callbacks, loggers and the rest
    (ech.callbacks.RollBack, {"saver": 3}, "a DistributedCheckpointSaver, got 3"),
    (partial(ech.callbacks.RollBack, Saver("d")), {"watch": 3}, "a function of .*got 3"),
    (partial(ech.callbacks.RollBack, Saver("d")), {"deviations": "a"}, "above 0, or None, got 'a'"),
    (partial(EarlyStopping, "loss"), {"early_stop_checker": 3}, "an EarlyStopChecker.*, got 3"),
    (EarlyStopChecker, {"patience": 1.5, "mode": "min"}, "a whole number of at least 0, got 1.5"),
    (partial(EarlyStopChecker, "min", 1), {"min_delta": "a"}, "a number of at least 0, got 'a'"),
    (partial(EarlyStopChecker, "min", 1), {"stopping_threshold": NAN}, "a number or None, got nan"),
    (GarbageCollector, {"step_interval": None}, "a whole number of at least 1, got None"),
    (GarbageCollector, {"step_interval": 0}, "a whole number of at least 1, got 0"),
    (LearningRateMonitor, {"loggers": 3}, "a logger or a list of loggers, got 3"),
    (PyTorchProfiler, {"profiler": None}, r"a torch.profiler.profile\(...\), got None"),
    (CSVLogger, {"path": 3}, "a file, got 3"),
    (partial(CSVLogger, "m.csv"), {"steps_before_flushing": 1.5}, "a whole number of at least 1, got 1.5"),
    (ech.evidence.RunDir, {"path": 3}, "a run's folder, got 3"),
    (ech.init_from_env, {"timeout": 3}, "a timedelta above 0, got 3"),
    (ech.init_from_env, {"float32_matmul_precision": "x"}, "'highest', 'high', 'medium' or None, got 'x'"),
    (ech.seed, {"seed": 2.5}, "a whole number, got 2.5"),
]


@pytest.mark.parametrize(("call", "given", "says"), ROWS, ids=[f"{i}-{'-'.join(given)}" for i, (_, given, _) in enumerate(ROWS)])
def test_a_bad_argument_is_refused_by_its_name(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any], given: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "" if " must be " in says or "no argument" in says else next(iter(given), "")
    with pytest.raises(EchelonError, match=f"{name} must be {says}" if name else says) as caught:
        call(**given)
    assert isinstance(caught.value, UsageError)
    assert not list(tmp_path.iterdir())


def test_options_keep_what_an_iterator_gave() -> None:
    """A layout is a value, used for several modules: read once, an iterator would leave nothing for the next."""
    mm = torch.ops.aten.mm.default
    assert ech.layouts.ActivationCheckpointParams(save_ops=iter([mm])).save_ops == (mm,)  # type: ignore[arg-type]
    ignored = linear()
    assert ech.FSDPStrategy(ignored_modules=iter([ignored])).ignored_modules == (ignored,)
    assert FSDP2Strategy(modules_to_shard=iter(["up"])).modules_to_shard == ("up",)


@pytest.mark.parametrize("flag", [True, 1, torch.tensor(False)])
def test_a_flag_may_be_one_or_a_scalar(flag: Any) -> None:
    assert ech.Loader(DATA, 2, pin_memory=flag).pin_memory is flag


def test_what_cannot_be_sent_to_ranks_is_named() -> None:
    held = unit()
    held.guard = threading.Lock()
    with refused(LaunchError):
        trainer().fit(held, DATA)
    with refused(LaunchError):
        trainer().fit(unit(), (batch for batch in DATA))
    lock = threading.Lock()
    with refused(LaunchError):
        pack(Call(lambda: lock, [((), {})]))
    with refused(LaunchError):
        ech.launch(abs, args=({"guard": lock},), ranks=1)


def test_spawn_takes_no_other_options_than_launch() -> None:
    with pytest.raises(TypeError, match=r"spawn\(\) got an unexpected keyword argument 'nope'"):
        ech.launching.spawn(abs, nope=3)
    with pytest.raises(TypeError, match=r"'ranks'\. It takes nprocs"):
        ech.launching.spawn(abs, ranks=2)
