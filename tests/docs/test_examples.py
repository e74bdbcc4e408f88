"""Every file of examples/, run small on two ranks as a separate program: it learns, says so, and goes on when started again."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ranks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
Command = Callable[..., subprocess.CompletedProcess[str]]

# Learned: what the last line says of a small run, and a bound that a run which does not learn misses.
# (script, its options, the pattern of a number in its output, the bound, whether the number has to be below it)
RUNS: dict[str, tuple[list[str], str, float, bool]] = {
    # Untrained, and with gradients of one rank only: below 0.6.
    "tabular.py": (["--epochs", "5"], r"AUC (0\.\d+) over 1001 held-out rows", 0.72, False),
    # By chance 0.004; without the other ranks' rows in the loss about a third less than here.
    "contrastive.py": (["--epochs", "5"], r"found for (\d+\.\d)% of held-out", 60.0, False),
    # By chance 0.5; no straight line has more than 0.65.
    "bare_loop.py": (["--epochs", "12"], r"accuracy (\d\.\d+) on 500 new points", 0.8, False),
    "gan.py": (["--epochs", "10"], r"from real points: (\d\.\d+); of noise", 0.2, True),
    # ln 10 = 2.3 knows nothing.
    "vision.py": (["--epochs", "4"], r"held-out loss (\d\.\d+) with averaged weights, accuracy 0\.\d+, on 450 images", 1.5, True),
    # Of an untrained module's points it is above 0.35.
    "diffusion.py": (["--epochs", "15"], r"made points are (\d\.\d+) from the moons", 0.3, True),
    # ln 256 = 5.55 knows nothing; how often each byte comes is about 3.3.
    "moe.py": (["--updates", "60"], r"held-out loss (\d\.\d+) nats per byte; the busiest expert had \d\.\d+ times", 3.2, True),
    # Above 6 at first.
    "chat.py": (["--epochs", "6"], r"held-out loss (\d\.\d+) nats per token of an answer; .* answers '[NY]", 2.0, True),
    # ln 256 = 5.55 knows nothing.
    "nodes.py": (["--updates", "60"], r"held-out loss (\d\.\d+) nats per byte after", 4.5, True),
    # ln 256 = 5.55 knows nothing.
    "pretrain.py": (["--updates", "100"], r"held-out loss (\d\.\d+) nats per byte", 4.0, True),
    # ln 2 = 0.693 prefers nothing.
    "dpo.py": (["--epochs", "4"], r"preference loss (\d\.\d+) after", 0.2, True),
    # By chance 0.1.
    "distill.py": (["--epochs", "15"], r"teacher 0\.\d+, student (\d\.\d+)", 0.85, False),
    "lightning_module.py": (["--epochs", "5"], r"validation accuracy (\d\.\d+), the best", 0.8, False),
}
# Two trainings, one after the other, of which prove sees the first; a library's own names, whose programs are proved elsewhere.
NOT_PROVED = ("distill.py", "lightning_module.py")
# Also with SGD in place of their optimizers; of the others the gradients are compared as well.
WITH_SGD = ("moe.py", "nodes.py", "gan.py")
# Those that have a test of their own, there or below.
ELSEWHERE = {
    "gpt.py": "docs/test_gpt.py",
    "notebook.ipynb": __name__,
}


def _start(command: Command, name: str, *args: str, env: dict[str, str] | None = None) -> str:
    done = command("run", "--ranks", "2", str(EXAMPLES / name), "--toy", *args, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "echelon/" not in "".join(re.findall(r".*Warning.*", done.stderr)), done.stderr  # of others' code, such as torchao's
    return done.stdout + done.stderr


def _assert_learned(name: str, text: str) -> None:
    _, pattern, bound, below = RUNS[name]
    found = re.search(pattern, text)
    assert found is not None, text
    assert float(found[1]) < bound if below else float(found[1]) > bound, text


@pytest.mark.full
@pytest.mark.parametrize("name", list(RUNS))
def test_it_learns_on_two_ranks_and_goes_on_when_it_is_started_again(echelon_command: Command, tmp_path: Path, name: str) -> None:
    options = RUNS[name][0]
    text = _start(echelon_command, name, *options)
    _assert_learned(name, text)
    assert list((tmp_path / "runs" / name.removesuffix(".py") / "checkpoints").glob("*step*"))
    limit, most = options
    again = _start(echelon_command, name, limit, str(int(most) + 1))
    first = re.search(r"training from update (\d+) of (\d+)", again)
    assert first is not None and 0 < int(first[1]) < int(first[2]), again


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in RUNS if name not in NOT_PROVED])
def test_echelon_prove_agrees(echelon_command: Command, name: str) -> None:
    """Not with accumulation: batch norm and a contrastive loss are over the batch that is computed at once."""
    options = ("--float64", "--layouts", "fsdp", "--accumulate", "1", *([] if name in WITH_SGD else ["--no-sgd"]))
    if name == "nodes.py":
        options = ("--layouts", "pp=2", "--accumulate", "4", "--no-sgd")
    common = ("--ranks", "2", "--updates", "2", "--json")
    done = echelon_command("prove", *options, *common, str(EXAMPLES / name), "--toy", timeout_s=300.0)
    rows = json.loads(done.stdout)["rows"]
    # The script's own layout, which pretrain.py's is, and this one; experts and stages have a row more.
    assert done.returncode == 0 and len(rows) == {"moe.py": 3, "nodes.py": 3, "pretrain.py": 1}.get(name, 2), done.stdout
    assert {row["verdict"] for row in rows} <= {"agrees", "bit-equal"}, rows


# --- contrastive: the gradient


def _modules() -> Any:
    import contrastive

    return contrastive


def _gradients(layout: str) -> tuple[dict[str, torch.Tensor], float]:
    """Of the example's own unit, over 8 pairs which the ranks share."""
    import torch.distributed as dist

    import echelon as ech

    torch.set_default_dtype(torch.float64)
    try:
        example = _modules()
        torch.manual_seed(0)
        unit = example.Contrast(module=example.Towers(), device=torch.device("cpu"), layout=layout)
        taken: dict[str, torch.Tensor] = {}

        def take(*_: Any) -> None:
            for name, parameter in unit.prepared.unwrapped.named_parameters():
                assert parameter.grad is not None
                taken[name] = (parameter.grad.full_tensor() if layout == "fsdp" and parameter.dim() else parameter.grad).clone()

        unit.optimizer.register_step_pre_hook(take)
        ech.train(unit, ech.Loader(example.views(8), 8, shuffle=False), max_epochs=1)
        assert dist.get_world_size() == 2
        return taken, float(unit.latest_update[0])
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.full
def test_the_gathered_gradient_is_that_of_one_process(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch over all 8 pairs at once. A detached gather, or one that divides, differs by tenths."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.set_default_dtype(torch.float64)
    try:
        example = _modules()
        torch.manual_seed(0)
        module = example.Towers()
        one, other, scale = module(*example.views(8).tensors)
        products, mine = scale * one @ other.T, torch.arange(8)
        loss = (nn.functional.cross_entropy(products, mine) + nn.functional.cross_entropy(products.T, mine)) / 2
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    for layout in ("ddp", "fsdp"):
        for taken, own in ranks(2, _gradients, layout):
            assert own == pytest.approx(float(loss.detach()), abs=1e-12)
            for name, parameter in module.named_parameters():
                assert parameter.grad is not None
                assert float((taken[name] - parameter.grad).abs().max()) < 1e-10, (layout, name)


# --- vision: batch norm over all ranks


def _batches() -> list[Any]:
    """Four global batches of 8 images."""
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(32, 3, 8, 8, generator=generator, dtype=torch.float64)
    return list(zip(images.split(8), torch.randint(4, (32,), generator=generator).split(8), strict=True))


def _network() -> nn.Module:
    import vision

    torch.manual_seed(0)
    module: nn.Module = vision.network(3, 4, width=4).double()
    return module


def _saw(layouts: list[str]) -> list[dict[str, torch.Tensor]]:
    """The example's own unit, over this rank's halves of the batches: weights and batch statistics."""
    import torch.distributed as dist
    import vision

    import echelon as ech

    found, rank, size = [], dist.get_rank(), dist.get_world_size()
    for layout in layouts:
        unit = vision.Classify(module=_network(), device=torch.device("cpu"), layout=layout)
        ech.train(unit, [(images[rank::size], labels[rank::size]) for images, labels in _batches()], max_epochs=1)
        state = unit.prepared.unwrapped.state_dict()
        found.append({n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in state.items()})
    return found


@pytest.mark.full
def test_batch_norm_over_two_ranks_trains_as_over_one_and_as_plain_pytorch(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, weights and batch statistics."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(nn.SyncBatchNorm, "convert_sync_batchnorm", lambda module: module)
    module = _network()
    monkeypatch.undo()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.05)
    for images, labels in _batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()
    want = module.state_dict()
    for size in (1, 2):
        for found in ranks(size, _saw, ["ddp", "fsdp"] if size == 2 else ["ddp"]):
            for state in found:
                assert state.keys() == want.keys()
                assert max(float((state[n] - t).abs().max()) for n, t in want.items()) < 1e-9


# --- chat: what is written


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks transformers by a name that is going out of use
def test_a_chat_tunes_the_adapter_of_a_folder_alone_and_no_prompt_counts(
    echelon_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import chat

    tokenizer = chat.tokenizer_of(None)
    sample = chat.sample(tokenizer, 6)
    counted = [token for token, label in zip(sample["input_ids"], sample["labels"], strict=True) if label != -100]
    assert tokenizer.decode(counted) == "Yes.<|end|>"
    assert tokenizer.decode(sample["input_ids"]) == "<|user|>Is 6 even?<|end|><|assistant|>Yes.<|end|>"

    base = chat.base_of(None, len(tokenizer))
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    text = _start(echelon_command, "chat.py", "--epochs", "2", "--model", "base", "--layout", "fsdp")
    assert re.search(r"held-out loss [0-3]\.\d+ nats", text), text  # of the folder itself 6
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "runs" / "chat" / "adapter")
    assert any(float(p.abs().max()) > 0 for n, p in tuned.named_parameters() if "lora_B" in n)


# --- a notebook


@pytest.mark.full
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs a kernel: pip install ipykernel jupyter_client")
    with warnings.catch_warnings(action="ignore"):
        from jupyter_client.manager import start_new_kernel

        manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    said: list[str] = []

    def hear(message: Any) -> None:
        content = message["content"]
        said[-1] += str(content.get("text", content.get("data", {}).get("text/plain", content.get("traceback", ""))))

    try:
        for cell in _notebook()["cells"]:
            if cell["cell_type"] == "code":
                said.append("")
                reply = client.execute_interactive("".join(cell["source"]), timeout=120, output_hook=hear)
                assert reply["content"]["status"] == "ok", said[-1]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    first, second = (ast.literal_eval(re.search(r"\[\{.*?\}\]", text.replace("\n", " "))[0]) for text in said[-3:-1])  # type: ignore[index]
    assert [row["begins at"] for row in first] == [0, 0] and [row["begins at"] for row in second] == [5, 5]
    assert first[0]["held-out loss"] < 0.1 and second[1]["held-out loss"] < first[1]["held-out loss"]
    assert "a fault on one rank" in said[-1] and ", in fall" in said[-1]


def _notebook() -> Any:
    return json.loads((EXAMPLES / "notebook.ipynb").read_text())


# --- the folder


def test_every_example_is_run_and_in_the_readme() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert files == set(RUNS) | set(ELSEWHERE), "an example is run by no test, or a test runs none"
    for name, test in ELSEWHERE.items():
        there = ROOT / "tests" / (test if test.endswith(".py") else "docs/test_examples.py")
        assert f'"{name}"' in there.read_text() or f"/{name}" in there.read_text(), (name, there)
    assert set(re.findall(r"\]\(([\w.]+\.(?:py|ipynb))\)", README)) == files
    commands = re.findall(r"`[^`]*examples/(\w+\.\w+)[^`]*`", README)
    assert files - {"notebook.ipynb"} <= set(commands)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_imports_from_no_deeper_than_a_user_does(path: Path) -> None:
    imported = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    core = [each for each in imported if each.startswith("echelon.") and not each.startswith("echelon.compat.")]
    assert [each for each in core if each.count(".") > 1] == []
