"""What an error means, by its words, and its remedy.

The words of torch, NCCL, CUDA and others are as seen in logs. If another program uses them for something else, only the remedy is
wrong: the guilty rank does not depend on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from echelon.common import errors
from echelon.diagnosis.aborted import DAMAGED
from echelon.diagnosis.failure import Failure
from echelon.diagnosis.words import lost_data_worker

__all__ = ["Kind", "kind_of", "kind_of_words"]

_MOST = 20_000


@dataclass(frozen=True)
class Kind:
    """A kind of error.

    Args:
        pattern: regular expression for "Class: message"; the message is the exception's own.
        cause: a word or two.
        remedy: a sentence or two; empty if the message says it all.
        ours: match only errors of echelon's own, since others use the same words.
    """

    pattern: str
    cause: str
    remedy: str
    ours: bool = False


_DATA_WORKER = Kind(
    r"([Ll]oader|data) worker\b.*(exited|killed|died|ended|did not|gave no)|DataLoader timed out|Pin memory thread exited",
    "data worker",
    "A data worker died or hung: its log lines say more. /dev/shm or memory may be full; num_workers=0 shows the error itself.",
)
# The first match counts.
_USAGE = "|".join(name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, errors.UsageError))
_KINDS = (
    Kind(
        r"OutOfMemoryError\b|\b(CUDA|HIP|XPU|NPU|MPS backend)( error:)? out of memory|CU(DNN|BLAS)_STATUS_ALLOC_FAILED|"
        r"Cuda failure (\d+ )?'out of memory'|Failed to CUDA [cm]alloc",
        "device out of memory",
        "The device had no memory left. Use smaller micro-batches, activation checkpointing, or a layout that shards.",
    ),
    Kind(
        r"^MemoryError\b|can't allocate memory|[Cc]annot allocate memory|std::bad_alloc|Unable to allocate .* for an array",
        "host out of memory",
        "The machine's memory, or the limit of this process (ulimit -v, the job's memory), was used up. Use fewer data "
        "workers or smaller batches, or ask for more memory.",
    ),
    Kind(
        r"Too many open files|\[Errno 2[34]\]|received \d+ items of ancdata",
        "too many open files",
        "The process reached its limit of open files: raise it (ulimit -n). Each tensor from a data worker takes one, unless "
        "torch.multiprocessing.set_sharing_strategy('file_system') is called first.",
    ),
    Kind(
        r"can't start new thread|^RuntimeError: Resource temporarily unavailable",  # Python's, C++'s
        "too many processes",
        "The limit of processes and threads was reached: see `ulimit -u` and the task limit of the job's cgroup.",
    ),
    Kind(
        r"(/dev/shm/|</torch_).*No space left on device|unable to write to file </torch_|unable to allocate shared memory|"
        r"while creating shared memory segment",
        "shared memory full",
        "/dev/shm is full or too small: `df -h /dev/shm`. A container has 64 MiB unless it is started with --ipc=host or a "
        "larger --shm-size; fewer data workers and smaller batches need less.",
    ),
    Kind(
        r"File too large|\[Errno 27\]",
        "file too large",
        "A file exceeded the size limit: raise it (`ulimit -f`), unless the file system sets it. Older "
        "checkpoints are unchanged, and the same command goes on from the newest.",
    ),
    Kind(
        r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]",
        "disk full",
        "Make room, or write elsewhere. Older checkpoints are unchanged, and the same command goes on from the newest.",
    ),
    Kind(
        r"unexpected pos \d+ vs \d+|basic_ios::clear: iostream error|PytorchStreamWriter failed writing",
        "disk full",
        "torch.save could not write its whole file: most often the disk is full (`df -h`), or a quota is used up (`quota`).",
    ),
    _DATA_WORKER,
    Kind(r"^DataError\b", "data", "The text names the sample."),
    Kind(
        r"^NonFiniteError\b|^DivergedError\b|\bnon-?finite\b|is not finite|\bnan\b.*\bloss\b|\bloss\b.*\bnan\b",
        "not finite",
        "Look at that rank's batch, lower the learning rate, or clip gradients.",
    ),
    Kind(
        r"EADDRINUSE|[Aa]ddress already in use|seems to have that port|port another job's",
        "port in use",
        "Another process has the port, perhaps an earlier run's. End it, or choose another MASTER_PORT.",
    ),
    Kind(
        r"did not come within|clients joined|could not join at|did not join|Timed out .*waiting for clients|"
        r"client socket has timed out|client failed to connect/validate",
        "ranks missing",
        "Start as many ranks as WORLD_SIZE says, with the same MASTER_ADDR, and check that no firewall is between them.",
    ),
    Kind(
        r"uncorrectable (ECC|NVLink)|[Ii]nvalid access of peer GPU memory|GPU is lost|fallen off the bus",
        "device fault",
        "The device or one of its links is faulty, not the program. Start again without that machine and have it checked: "
        "`dmesg` has the driver's Xid.",
    ),
    Kind(
        r"(CUDA error|Cuda failure|HIP error).*(device-side assert|illegal (memory|instruction|address)|misaligned address|"
        r"unspecified launch failure|invalid program counter)|CU(DNN|BLAS)_STATUS_EXECUTION_FAILED",
        "device error",
        "Devices report such an error later than the call that caused it, so the line may be wrong: "
        "CUDA_LAUNCH_BLOCKING=1 shows the right one. An index or a label out of range is the usual reason.",
    ),
    Kind(
        r"CU(DNN|BLAS)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)",
        "device error",
        "Most often the device had no memory left; otherwise an earlier index was out of range. Try smaller micro-batches, then "
        "CUDA_LAUNCH_BLOCKING=1.",
    ),
    Kind(
        r"no kernel image is available|driver on your system is too old|driver version is insufficient|Found no NVIDIA driver|"
        r"CUDA-capable device(\(s\) is/are|s are) busy|No CUDA GPUs are available|invalid device ordinal|"
        r"not compiled with CUDA|system not yet initialized|CUDA unknown error",
        "device setup",
        "The device cannot be used: torch was built for other devices or another driver, no device has that number, or "
        "another process holds it. `nvidia-smi` shows devices, driver and the processes that use them; `echelon doctor` "
        "compares the ranks.",
    ),
    Kind(
        r"Duplicate GPU detected",
        "device shared",
        "Several ranks compute on one device. Start no more ranks than there are devices, and let each take the device of its "
        "local rank, as `ech.init_from_env()` does.",
    ),
    Kind(
        r"no socket interface found|is neither AF_INET\(2\) nor AF_INET6|Unable to find (address|interface) for",
        "network interface",
        "The host has no such network interface, or it has no address: `ip addr` lists them. GLOO_SOCKET_IFNAME, "
        "NCCL_SOCKET_IFNAME and TP_SOCKET_IFNAME must name one, or be unset.",
    ),
    Kind(
        r"\bNCCL error\b|\bnccl(Unhandled|System|Internal|Invalid)\w*",
        "NCCL",
        "NCCL_DEBUG=INFO shows what NCCL did before; `echelon doctor` tests the network and the devices.",
    ),
    Kind(
        r"^(HfHubHTTPError|LocalEntryNotFoundError|OfflineModeIsEnabled|GatedRepoError|RepositoryNotFoundError)\b|"
        r"connect to 'https://huggingface\.co'|Couldn't reach .* on the Hub",
        "download",
        "Every rank asks the server. Download once before the run, into a cache that all ranks see, and set HF_HUB_OFFLINE=1.",
    ),
    Kind(
        r"\bversions? (differ|disagree)|(differ|disagree|another)\b.*\b(versions?|code|hash|configuration)\b|another echelon",
        "ranks differ",
        "Start every rank with the same code, configuration and packages.",
        ours=True,
    ),
    Kind(r"ranks must run the same program|world size must be the same", "ranks differ", "", ours=True),
    Kind(
        r"DDP expects same model across all ranks|appears not to match (sizes|strides) of the same param in process",
        "ranks differ",
        "Every rank must build the same module. A rank for which no parameters are shown may have failed earlier: see its log.",
    ),
    Kind(
        r"got mixed torch\.Tensor and DTensor",
        "whole and split tensors",
        "The model's parameters are sharded, and the script combines them with whole tensors, as an average of weights by hand "
        "does (lerp_, AveragedModel, ModelEmaV3). Use ema=0.999 of an AutoUnit, whose averages are sharded alike; "
        "in a loop of your own clone parameters after prepare(), or give prepare() the copy, too, and average buffers, which "
        "stay whole, separately from parameters (ModelEmaV3(foreach=False), AveragedModel(use_buffers=False)); or train under "
        "'ddp' or 'zero1', with whole parameters.",
    ),
    Kind(r"^RanksDisagreeError\b", "ranks disagree", ""),
    Kind(rf"^({_USAGE})\b", "usage", ""),
    Kind(
        r"^(CheckpointCorruptError|CheckpointMismatchError|CheckpointNotFoundError|CheckpointUnreadableError)\b", "checkpoint", ""
    ),
    Kind(r"^CheckpointWriteError\b", "checkpoint", "The storage refused the save. Older checkpoints are unchanged."),
    Kind(
        rf"^{DAMAGED}",
        "crash",
        "C or C++ code had damaged the memory, perhaps long before this line: an extension, or a library of another build.",
    ),
    Kind(
        r"^KeyboardInterrupt\b",
        "interrupted",
        "It was sent SIGINT: by a person (Ctrl-C, kill -2), or by a program that the job started.",
    ),
    Kind(
        r"^BdbQuit\b|^EOFError: EOF when reading a line",
        "debugger",
        "It reached a breakpoint or input(), but a rank has no terminal: `echelon run --ranks 1` runs the script where "
        "there is one.",
    ),
    Kind(
        r"^exit: exit code",
        "exit",
        "It called os._exit, or code in C ended the process.",
    ),
    Kind(r"^(ModuleNotFoundError|ImportError)\b", "import", "Install the package, or correct the file."),
    Kind(r"^(SyntaxError|IndentationError|TabError)\b", "import", "Correct the file."),
)


def kind_of(failure: Failure) -> Kind | None:
    """The kind of a rank's own error; None if it is not a known one."""
    if lost_data_worker(failure):
        return _DATA_WORKER
    return _first(f"{failure.kind}: {failure.message}", failure, raised_there=failure.message.startswith("Caught "))


def kind_of_words(words: str) -> Kind | None:
    """The kind of a message that a process printed before it aborted itself."""
    return _first(words)


def _first(text: str, failure: Failure | None = None, *, raised_there: bool = False) -> Kind | None:
    ours = failure is not None and failure.ours
    kinds = (kind for kind in _KINDS if (ours or not kind.ours) and not (raised_there and kind is _DATA_WORKER))
    return next((kind for kind in kinds if re.search(kind.pattern, text[:_MOST])), None)
