"""A page for each error code: its meaning, an example, the remedy. `echelon explain CODE` shows one of them."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.common import errors
from echelon.common.errors import EchelonError

__all__ = ["PAGES", "Page", "as_markdown", "as_text", "class_of"]


@dataclass(frozen=True)
class Page:
    """The page of one code.

    Args:
        meaning: when the error is raised, in a sentence or two.
        example: a message as it is printed.
        remedy: what to try, the most helpful first.
    """

    meaning: str
    example: str
    remedy: str


PAGES = {
    "E-ECHELON": Page(
        "An error of another rank, of a kind that this rank does not know; or the base of all others.",
        "saving failed: OSError: [Errno 116] Stale file handle",
        "Look at the rank that is named: its log has the whole traceback.",
    ),
    "E-USAGE": Page(
        "An argument has an invalid value, and its subject has no code of its own. "
        "The message names the argument, what it must be, and what it got.",
        "seed must be between 0 and 4294967295, numpy's range, got -1.",
        "Change the value. Nothing was started or written before the check.",
    ),
    "E-ENVIRONMENT": Page(
        "Only some of RANK, WORLD_SIZE, MASTER_ADDR and the like are set, they contradict each other, or name a taken address.",
        "RANK=0 is set but WORLD_SIZE is not (torchrun's variables). Set both, or unset RANK to run one process alone.",
        "Start the script with `echelon run`, torchrun or srun, which set all of them; or unset variables left in this shell.",
    ),
    "E-COMMAND": Page(
        "An option of a command, or two of them together, cannot work.",
        "--ranks must be given once, got --ranks 2 and --ranks 4.",
        "`echelon COMMAND --help` lists the options with their defaults.",
    ),
    "E-SCRIPT": Page(
        "The program to start is not there, cannot be read, or is no Python file or module.",
        "there is no file trian.py in this folder. Did you mean train.py?",
        "Give the path relative to the current folder, or `-m package.module`.",
    ),
    "E-RUN-FOLDER": Page(
        "The folder of a run is missing, belongs to another user, is used by a live run, or holds something else.",
        "runs/a is in use by process 4711 on this machine. Wait for it, or choose another --name.",
        "List runs with `ls runs`; give a run by its name or its folder; choose another `--name` for a new one.",
    ),
    "E-CLUSTER": Page(
        "A job of Slurm or Dragon asks for something that does not exist, or the cluster's own command refused it.",
        "sbatch: error: invalid partition specified: gpus. Partitions here: debug, batch.",
        "`echelon submit --dry-run ...` shows the job and asks the cluster without starting it; `echelon doctor` checks nodes.",
    ),
    "E-LAUNCH": Page(
        "A function cannot run on ranks: it cannot be sent to other processes, or there are more ranks than this machine has.",
        "ranks must be at least 1, or 'auto' for one per device or core, got 0.",
        "Define the function at the top of a module and give it plain arguments; open files and connections inside of it.",
    ),
    "E-DEVICE": Page(
        "A device that does not exist here, or that this process may not use.",
        "device_type is 'cuda', but torch finds no CUDA device here. Use device_type='cpu'.",
        "Leave the device out: it is a GPU if there is one. `--device cpu` and ECHELON_DEVICE=cpu override it.",
    ),
    "E-LOADER": Page(
        "A loader cannot give all ranks the batches that the global batch asks for: its size, sampler, workers or dataset.",
        "global_batch must be a multiple of accumulate x ranks, 8, got 12.",
        "Give `echelon.Loader` the global batch and let it divide it; give samplers' weights by `echelon.data.Weighted`.",
    ),
    "E-DATASET": Page(
        "A dataset's files or shape are not what its class reads.",
        "tokens.bin holds 10 bytes, which are no whole number of uint32 tokens.",
        "Write token files with `echelon.data.write_tokens`; look at the file that is named.",
    ),
    "E-DATA": Page(
        "A sample could not be read, or the data worker that read it died or did not answer in time.",
        "sample 1234 could not be read on rank 1 by worker 0: OSError: [Errno 5] Input/output error",
        "Read that sample alone.",
    ),
    "E-LAYOUT": Page(
        "The layout is no known word, does not fit the number of ranks, or does not support the model.",
        "layout must be one of 'none', 'ddp', 'fsdp', 'hsdp', 'zero1', 'zero2', 'local_sgd', 'diloco', axes such as "
        "'dp_shard=2,tp=4' or 'pp=4', or a value such as Layout(...) or FSDPStrategy(...), got 'fdsp'. Is it 'fsdp'?",
        "Choose another layout (docs/strategies.md); `echelon plan SCRIPT --layers` shows what a layout does with each layer.",
    ),
    "E-TENSOR-PARALLEL": Page(
        "A layer cannot be split as the tensor-parallel plan says, or needs to be whole.",
        "tensor-parallel plan: 'blocks.*.q' matches no submodule of GPT.",
        "Compare the plan with the names in `echelon plan SCRIPT --layers`; leave the layer out, or let the plan be inferred.",
    ),
    "E-CONTEXT-PARALLEL": Page(
        "Something needs whole sequences, but a rank has only a part: a mask, positions, a mean over tokens, a convolution.",
        "attn_mask must be None or is_causal under context parallelism, got a mask of (64, 64).",
        "Positions come from `echelon.nn.positions`, keys of masks from `echelon.nn.whole_sequence` (guides/long_sequences.md).",
    ),
    "E-PIPELINE": Page(
        "The model cannot be cut into stages, or its forward pass does something that does not work across stages.",
        "pp must be at most 3 for GPT, which has 3 blocks, got 4.",
        "The message names the module or the line. Make it a block that returns the input of the next one, or use fewer stages.",
    ),
    "E-EXPERTS": Page(
        "Experts cannot be divided over the ranks, or their auxiliary loss is not in the loss.",
        "ep must divide the number of experts, 8, got 3.",
        "Use `echelon.nn.MoE`, and add `echelon.nn.auxiliary_loss(module)` to the loss if its balance is 'auxiliary'.",
    ),
    "E-PRECISION": Page(
        "A number type that this device, this layout or a gradient scaler does not support.",
        "precision must be 'fp32', 'bf16', 'fp16', 'float8', a torch dtype or ech.layouts.Precision(...), got 'bf8'.",
        'Use "bf16", which needs no scaler.',
    ),
    "E-RECOMPUTE": Page(
        "The choice of activations to recompute matches no module, or modules that cannot be recomputed.",
        "recompute matches no module of Net.",
        'Use "blocks", or name modules as `model.named_modules()` does.',
    ),
    "E-COMPILE": Page(
        "A module cannot be compiled, or not together with another option.",
        'compile="blocks" finds no repeated blocks in Net.',
        "Use compile=True for the whole module, or leave it out.",
    ),
    "E-OPTIMIZER": Page(
        "The optimizer holds other parameters than the model's or none that train, or cannot step on the layout's parameters.",
        "the optimizer holds 4 parameters that are not the module's.",
        "Build it in `configure_optimizers_and_lr_scheduler(module)`, from the module that is given there.",
    ),
    "E-LOOP": Page(
        "A training, evaluation or prediction cannot begin or continue, because of its limits, its loaders or a unit's options.",
        "train() needs max_epochs or max_updates: without both it would never end. Give max_epochs=math.inf for a "
        "run that ends when something calls state.stop().",
        "The message names the argument; docs/trainer.md has the options of units.",
    ),
    "E-OWN-LOOP": Page(
        "A loop of your own makes calls in an order that cannot be right on several ranks.",
        "echelon.window(...) must be given the model, optimizer or training loader that echelon.prepare(...) "
        "returned, got another Sequential.",
        "Compare with the loop in docs/guides/bare_loop.md.",
    ),
    "E-TRAINER": Page(
        "A Trainer has an argument that it does not know, or a unit that cannot be sent to other processes.",
        "num_nodes=2, but this process was not launched on several nodes, and starts ranks on its own only.",
        "Pass a function that builds the unit, so that each rank builds its own.",
    ),
    "E-CALLBACK": Page(
        "A callback's options are wrong, or the number that it watches was never logged and is no attribute of the unit.",
        "early stopping monitors 'acc', but there is no such number for Unit. There are: eval_loss, loss.",
        'Log it by `state.log("acc", value)`, or give one of the names that the message lists.',
    ),
    "E-LOGGER": Page(
        "A value that is no number, a name that is taken, or a tracker that cannot be reached.",
        "state.log('scores') must be given one number, got 10 of them. Log their mean or sum.",
        "Reduce the value to one number; check the tracker's own settings.",
    ),
    "E-UNIT": Page(
        "A unit lacks a method or a base class that the entry point needs.",
        "the unit of train() must inherit from TrainUnit, which has train_step, got Sequential.",
        "Derive from AutoUnit, or from TrainUnit for a step of your own.",
    ),
    "E-LOSS": Page(
        "`compute_loss` returned something that has no gradient, or is no scalar.",
        "Shape.compute_loss returned a loss of shape (2, 1); it must be a scalar: take its mean.",
        "Take its mean; look for `.detach()`, `.item()` or `torch.no_grad()` in its computation.",
    ),
    "E-NOT-FINITE": Page(
        "Losses or gradients were inf or nan for several updates in a row.",
        "the loss was nan for 10 updates in a row, the first at update 412 on rank 1.",
        "Restore an earlier checkpoint with a lower learning rate or with clipping; `detect_anomaly=True` names the operation.",
    ),
    "E-DIVERGED": Page(
        "The loss grew or became nan again and again, although the run rolled back to older checkpoints.",
        "the loss left its bounds at step 900 for the third time.",
        "Lower the learning rate; look at the samples that the message names.",
    ),
    "E-RANKS-DISAGREE": Page(
        "Ranks hold different values of something that must be the same: a loader's length, a limit, a model, a version.",
        "the loaders' lengths must be the same on all ranks, got rank 0: 12, rank 1: 11.",
        "Build it alike on all ranks: one seed, no rank in a condition, `echelon.Loader` in place of splitting by hand.",
    ),
    "E-RANK-FAILED": Page(
        "A rank of a launched job raised, exited with an error or was killed. Its number and exit code are fields.",
        "rank 1 failed first (exit code 137)",
        "`echelon explain RUN` says which rank failed first, and why.",
    ),
    "E-RANK-TIMEOUT": Page(
        "The ranks did not finish within the time limit. The message has the stacks of all ranks.",
        "the ranks did not finish within 60 s",
        "Find the line where most ranks wait, and the rank that is elsewhere (docs/guides/hangs.md).",
    ),
    "E-CHECKPOINT": Page(
        "A checkpoint could not be written or read, for a reason that no other code names.",
        "checkpoints/step-00000500 has format 3, but this echelon reads formats up to 2. Update echelon.",
        "Do what the message says; `echelon ckpt verify FOLDER` checks every file.",
    ),
    "E-CHECKPOINT-NOT-FOUND": Page(
        "There is no checkpoint at the given path.",
        "checkpoints/step-00000500 holds no checkpoint: there is no such folder.",
        "`echelon ckpt ls FOLDER` lists the existing ones.",
    ),
    "E-CHECKPOINT-UNREADABLE": Page(
        "The checkpoint exists, but the system does not let this process read it. No older one is taken instead.",
        "checkpoints/step-00000500/manifest.json is there but cannot be read: Permission denied.",
        "Read it as its owner, or change its permissions.",
    ),
    "E-CHECKPOINT-CORRUPT": Page(
        "A file of a checkpoint is missing, cut off or changed.",
        "checkpoints/step-00000500/rank-00000.safetensors is cut off or grown: 1024 bytes instead of 4096.",
        "Resume from the checkpoint before; `echelon ckpt verify FOLDER` names damaged files.",
    ),
    "E-CHECKPOINT-MISMATCH": Page(
        "A whole checkpoint of another model, optimizer, dataset or batch. The message has a table of what changed.",
        "the checkpoint does not fit: head.weight has shape (10, 64) there, (12, 64) here.",
        "For a new run use another folder, or an empty one. Otherwise build the model that was saved, or allow differences by "
        "RestoreOptions (docs/checkpoints.md).",
    ),
    "E-CHECKPOINT-WRITE": Page(
        "The storage refused a save: a full disk, a permission, an I/O error. Older checkpoints are unchanged.",
        "update 500 could not be saved, the first failure: rank 0: OSError: [Errno 28] No space left on device",
        "Make room, or keep fewer checkpoints. Training continues through a few failures in a row.",
    ),
    "E-CHECKPOINT-IN-USE": Page(
        "Another live run writes into the same folder of checkpoints.",
        "checkpoints is being written by another run: process 4711 of ada on node1. End that run, or save to another folder.",
        "End that run, or give this one another folder.",
    ),
    "E-CHECKPOINT-OPTION": Page(
        "An option for saving, keeping, restoring or exporting checkpoints has a value that cannot work.",
        "keep must be a whole number, at least 1, or None for all, got 0.",
        "docs/checkpoints.md has the options.",
    ),
    "E-PROVE": Page(
        "`prove` cannot try the script, or not with these options.",
        "prove needs at least one layout and one number of ranks, got none.",
        "`echelon prove --help`; a script must train when it is run, and end.",
    ),
    "E-PLAN": Page(
        "`plan` cannot compute what it was asked for.",
        "train.py builds no unit, and calls no prepare().",
        "Give a script that trains; `echelon plan --help` has the options.",
    ),
    "E-NOT-HERE": Page(
        "Another library has something under a name that `echelon.compat` answers to, and echelon does not have it.",
        "pytorch.loggers.NeptuneLogger is not part of echelon.compat. Instead: a subclass of Logger that calls neptune.",
        "The message says what to use instead; docs/compared.md lists what is not here.",
    ),
}


# The contents of `fields`, by the first class that has them; subclasses have the same.
_FIELDS: dict[type[EchelonError], str] = {
    errors.UsageError: "for an argument, `name`, `expected` and `got`, as texts",
    errors.RankFailedError: "`rank` and `exit_code` of the rank that failed first",
    errors.RanksDisagreeError: "for a compared value, `name`, and `values` by rank",
    errors.DataError: "the numbers of `sample` and `worker`, if known; for a file of data, `path`",
    errors.CheckpointNotFoundError: "`path`, the folder or file",
    errors.CheckpointCorruptError: "`path`, the file or the checkpoint, if one is named",
    errors.CheckpointMismatchError: "`changed`, the names of what differs from the save",
}


def _fields(code: str) -> str:
    return next((f"Fields: {what}.\n\n" for kind, what in _FIELDS.items() if issubclass(class_of(code), kind)), "")


def class_of(code: str) -> type[EchelonError]:
    """The class with a code."""
    error_class: type[EchelonError] = next(
        kind for kind in vars(errors).values() if isinstance(kind, type) and vars(kind).get("code") == code
    )
    return error_class


def as_text(code: str) -> str:
    """A page as text for the terminal."""
    page = PAGES[code]
    kind = class_of(code).__name__
    return f"{code} ({kind})\n\n{page.meaning}\n\n    {page.example}\n\n{_fields(code)}What to do: {page.remedy}"


def as_markdown() -> str:
    """All pages as Markdown, for docs/errors.md."""
    head = (
        "# Errors by code\n\n"
        "Each error has a `code` that stays when its words change, and `fields` with its facts. `echelon explain CODE` "
        "shows one of these pages at the terminal. The classes are in `echelon.errors`; all are an `EchelonError`.\n"
    )
    pages = (
        f"\n## {code}\n\n`{class_of(code).__name__}`. {page.meaning}\n\n```text\n{page.example}\n```\n\n"
        f"{_fields(code)}**What to do:** {page.remedy}\n"
        for code, page in PAGES.items()
    )
    return head + "".join(pages)
