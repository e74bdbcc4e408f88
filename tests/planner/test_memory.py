"""`echelon plan`: what each layout holds, traced through the code that trains, without the memory."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from echelon.common.errors import PlanError
from echelon.planner.devices import DEVICES, Cluster, bytes_of, device_named
from echelon.planner.memory import Setting, state_by_formula
from tests.kit.plans import DEPTH, PARAMETERS, TRAINS, UNIT, WIDTH, Command, told
from tests.kit.refusals import refused
from tests.kit.started import wait_until

LOOP = """
import torch
import echelon as ech

ech.init_from_env()
with ech.on_meta():
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH), torch.randn(64, WIDTH))
model, optimizer, loader = ech.prepare(model, optimizer, ech.Loader(data, global_batch=8), layout="fsdp")
for epoch in ech.epochs(loader, 2):
    for x, y in loader:
        with ech.window(model) as window:
            loss = torch.nn.functional.mse_loss(model(x), y)
            window.backward(loss)
            if loss.item() > 1e6 or torch.isnan(loss).any() or loss.detach().cpu().numpy().max() > 1:
                raise SystemExit(f"lost: {loss:.3f}")
            print(f"{loss:.3f} {loss}")
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def plan(echelon_command: Command, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        return echelon_command("plan", *options, "train.py")

    return run


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def test_a_script_that_ends_before_it_gives_a_module_is_run_once(tmp_path: Path, echelon_command: Command) -> None:
    """It ran once under each layout, and said as often what it lacks."""
    (tmp_path / "train.py").write_text("import sys\nopen('ran', 'a').write('x')\nsys.exit('no --data')\n")
    done = echelon_command("plan", "--gpus", "4", "train.py")
    assert done.returncode == 2 and (tmp_path / "ran").read_text() == "x"
    assert "nothing could be traced: SystemExit: no --data at" in done.stderr and "train.py:3" in done.stderr


@pytest.mark.full
def test_each_layout_holds_what_it_says(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = plan(UNIT + TRAINS, "--gpus", "4", "--json")
    layouts = told(done)
    assert done.returncode == 0
    assert [each["layout"] for each in layouts.values()] == ["ddp", "zero1", "zero2", "fsdp", "dp_shard=2,tp=2"]
    assert layouts["ddp"]["is_own"] and layouts["ddp"]["parameters"] == PARAMETERS
    whole = DEPTH * (rounded(4 * WIDTH * WIDTH) + rounded(4 * WIDTH))
    ddp, zero1, fsdp = (layouts[name]["by_kind"] for name in ("ddp", "zero1", "fsdp"))
    assert ddp["parameters"] == whole and 4 * PARAMETERS <= ddp["gradients"] <= whole  # a bucket
    assert 2 * whole <= ddp["optimizer"] <= 2 * whole + 2 * DEPTH * 512  # and counts of steps
    assert zero1["parameters"] == pytest.approx(whole, rel=0.01) and zero1["optimizer"] == pytest.approx(whole / 2, rel=0.1)
    part = DEPTH * (rounded(4 * WIDTH * WIDTH // 4) + rounded(4 * WIDTH // 4))
    assert fsdp["parameters"] == part and 2 * part <= fsdp["optimizer"] <= 2 * part + 2 * DEPTH * 512
    assert fsdp.get("temporary", 0) < whole  # torch tries operators of sharded tensors on whole shapes, which no rank has
    # All-reduce: 2 (n - 1) / n of the gradients; all-gathers in the forward and the backward pass, and a reduce-scatter.
    assert layouts["ddp"]["sent"] == pytest.approx(4 * PARAMETERS * 2 * 3 / 4, rel=0.01)
    assert 4 * PARAMETERS * 2 * 3 / 4 <= layouts["fsdp"]["sent"] <= 4 * PARAMETERS * 3 * 3 / 4 * 1.01
    rows = 2  # of 8 on 4 ranks; a product in the forward pass, two in the backward, but for the first layer's input
    assert layouts["ddp"]["flops"] == 2 * rows * WIDTH * WIDTH * (3 * DEPTH - 1)


def test_on_cpus_gloo_collects_a_whole_tensor_in_a_buffer_of_its_own(
    plan: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Measured with torch 2.13: an all-gather or a reduce-scatter takes as many bytes more as its whole tensor has. All
    layers are one unit here.
    """
    (tmp_path / "cpu.toml").write_text("overlaps = false\n")
    words = ("--gpus", "2", "--json", "--only", "fsdp")
    on_gpu, on_cpu = (told(plan(UNIT + TRAINS, *words, *more))["fsdp"] for more in ((), ("--device", "cpu.toml")))
    assert on_cpu["peak"] - on_gpu["peak"] == pytest.approx(4 * PARAMETERS, rel=0.15)  # a CPU's allocations are rounded less


@pytest.mark.full
def test_a_loop_of_ones_own_is_traced_and_values_are_made_up(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = LOOP.replace("WIDTH", str(WIDTH)).replace("DEPTH", str(DEPTH))
    layouts = told(plan(script, "--gpus", "2", "--json", "--layout", "ddp"))
    assert list(layouts) == ["fsdp", "ddp"] and layouts["fsdp"]["is_own"]
    assert layouts["fsdp"]["peak"] < layouts["ddp"]["peak"] and layouts["fsdp"]["read"] >= 6


def test_recomputed_blocks_hold_less_and_a_search_tries_them(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Of a rank's one sample, which no micro-batch divides."""
    blocks = UNIT.replace("randn(64", "randn(64, 512").replace("=8", "=2").replace("layers = [", "layers = [torch.nn.Sequential(")
    blocks = blocks.replace(f"torch.nn.Linear({WIDTH}, {WIDTH}) for", f"torch.nn.Linear({WIDTH}, {WIDTH}), torch.nn.GELU()) for")
    train = "ech.train(Fit(module=torch.nn.Sequential(*layers), layout='ddp'{}), loader, max_updates=3)"
    kept, recomputed = (
        told(plan(blocks + train.format(more), "--gpus", "2", "--json", "--layout", "ddp"))["ddp"]
        for more in ("", ", recompute='blocks'")
    )
    assert recomputed["by_kind"]["activations"] < kept["by_kind"]["activations"] and recomputed["flops"] > kept["flops"]
    budget = f"{(recomputed['peak'] + kept['peak']) / 2**21:.3f}MiB"
    searched = plan(blocks + train.format(""), "--cluster", "1x2xH100", "--budget", budget, "--search")
    assert searched.returncode == 0 and "(with recompute='blocks')" in searched.stdout, searched.stdout + searched.stderr


RESIDUAL = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(96, 4096), torch.nn.Linear(4096, 96)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

ech.train(Fit(module=torch.nn.Sequential(*(Block() for _ in range(8))), layout="fsdp"), loader, max_updates=2)
"""


def test_a_search_that_finds_nothing_tries_the_hosts_memory(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    options = ("--gpus", "4", "--device", "h100-sxm", "--search", "--budget", "14MiB")
    done = plan(UNIT + RESIDUAL, *options)
    assert "fsdp, recompute, offload" in done.stdout and "at risk" in done.stdout, done.stdout + done.stderr
    assert "(with recompute='blocks', layout=FSDPStrategy(cpu_offload=True))" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("fsdp, recompute, offload")]
    assert row.split()[5:7] == ["0", "0"], "no parameters, no gradients"
    assert "host" in done.stdout.partition("fsdp: ")[2].splitlines()[0], "that takes time"


@pytest.mark.full
def test_collectives_of_the_scripts_own_are_traced(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    calls = (
        "torch.distributed.reduce(total := loss.detach().clone(), 0)",
        "torch.distributed.gather(total, [total.clone(), total.clone()])",
        "torch.distributed.scatter(total.clone(), [total, total])",
        "torch.distributed.barrier()",
    )
    script = LOOP.replace("WIDTH", str(WIDTH)).replace("DEPTH", str(DEPTH))
    script = script.replace("optimizer.step()", "\n            ".join(("optimizer.step()", *calls)))
    assert all(each["peak"] for each in told(plan(script, "--gpus", "2", "--json", "--only", "yours")).values())


@pytest.mark.full
def test_micro_batches_between_the_second_and_the_last_are_not_computed_if_they_are_alike(
    plan: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The first, the second and the last are, of the first update the first and the last, and those of another shape."""
    counts = "        open(__file__ + '.computed', 'a').write('.')\n        return torch"
    script = UNIT.replace("        return torch", counts, 1).replace("global_batch=8", "global_batch=16, accumulate=ACC")
    fit = "ech.train(Fit(module=torch.nn.Sequential(*layers), layout='fsdp'), DATA, max_updates=2)\n"
    found, computed = {}, {}
    uneven = "[[t[:each] for t in (torch.randn(4, 96), torch.randn(4, 96))] for each in (2, 2, 3, 2, 2, 2, 3, 2)]"
    for name, of, data in (("2", "2", "loader"), ("8", "8", "loader"), ("uneven", "8", uneven)):
        train = fit.replace("layout='fsdp'", "layout='fsdp', accumulate=4" if data == uneven else "layout='fsdp'")
        done = plan(script.replace("ACC", of) + train.replace("DATA", data), "--gpus", "2", "--only", "yours", "--json")
        (found[name],) = told(done).values()
        computed[name] = len((tmp_path / "train.py.computed").read_text()) - sum(computed.values())
    assert computed == {"2": 4, "8": 5, "uneven": 7}
    of_two, of_eight = found["2"], found["8"]
    assert of_two["flops"] == of_eight["flops"] and of_two["micro_batches"] * 4 == of_eight["micro_batches"] == 8
    assert of_two["sent"] < of_eight["sent"]  # gathered for each


@pytest.mark.full
@pytest.mark.usefixtures("forked_programs")
def test_a_plan_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    waits = "        open(__file__ + '.pid', 'w').write(str(os.getpid()))\n        time.sleep(600)\n        return torch"
    script = UNIT.replace("        return torch", waits, 1).replace("import sys\n", "import os, sys, time\n")
    (tmp_path / "train.py").write_text(script + TRAINS)
    words = [sys.executable, "-m", "echelon", "plan", "--gpus", "2", "--only", "yours", "train.py"]
    planning = subprocess.Popen(words, cwd=tmp_path)
    told = tmp_path / "train.py.pid"
    tracer = int(wait_until(lambda: told.exists() and told.read_text(), "the script to be traced"))
    planning.terminate()
    planning.wait(timeout=120)
    wait_until(lambda: not psutil.pid_exists(tracer), "the process that traces to end")


@pytest.mark.full
def test_eight_bits_are_planned_without_a_device_that_has_them(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = UNIT + TRAINS.replace("layout='ddp'", "layout='fsdp', precision='float8'")
    given = ("--cluster", "1x2xh100", "--only", "yours", "--json")
    (eight,), (sixteen,) = (told(plan(script, *given, *more)).values() for more in ((), ("--precision", "bf16")))
    assert (eight["dtype"], sixteen["dtype"]) == ("float8", "bfloat16")
    assert eight["flops"] * 11 == sixteen["flops"] * 12  # torchao's layers compute the gradient of the first one's input, too


@pytest.mark.full
def test_updates_of_several_epochs_are_counted_together(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = LOOP.replace("WIDTH", str(WIDTH)).replace("DEPTH", str(DEPTH)).replace("ech.epochs(loader, 2)", "range(2)")
    layouts = told(plan(script.replace("randn(64", "randn(8"), "--gpus", "2", "--json", "--only", "yours"))
    assert all(each["by_kind"]["optimizer"] for each in layouts.values())


@pytest.mark.full
@pytest.mark.parametrize(
    ("unit", "kept"),
    [
        ("Fit(module=model, layout='ddp', ema=0.9)", 1),
        ("Fit(module=model, layout='ddp', ema=ech.units.SWAParams(100, 1, averaging_method='ema'))", 1),
        ("Fit(module=model, layout='ddp'); unit.teacher = torch.nn.Linear(WIDTH, WIDTH)", 1 / DEPTH),
    ],
)
def test_averages_and_other_modules_are_kept(
    plan: Callable[..., subprocess.CompletedProcess[str]], unit: str, kept: float
) -> None:
    script = f"{UNIT}model = torch.nn.Sequential(*layers)\nunit = {unit.replace('WIDTH', str(WIDTH))}\n"
    found = told(plan(script + "ech.train(unit, loader, max_updates=8)\n", "--gpus", "2", "--json", "--layout", "ddp"))["ddp"]
    assert found["by_kind"]["kept"] == kept * found["by_kind"]["parameters"]


@pytest.mark.full
def test_a_loader_may_have_workers(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = UNIT.replace("global_batch=8", "global_batch=8, num_workers=1") + TRAINS
    layouts = told(plan(script, "--gpus", "2", "--json", "--layout", "ddp"))
    assert layouts["ddp"]["peak"] and not layouts["ddp"]["why"]


@pytest.mark.full
def test_a_model_that_no_machine_here_could_hold(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = LOOP.replace("WIDTH", "65536").replace("DEPTH", "20").replace('"fsdp"', "ech.FSDPStrategy(blocks=[torch.nn.Linear])")
    script = script.replace("randn(64, 65536)", "zeros(1, 1).expand(4096, 65536)").replace("global_batch=8", "global_batch=1024")
    script = script.replace("with ech.on_meta():\n    model", "model")  # a plain build takes no memory, either
    done = plan(script, "--cluster", "128x8xH100", "--json", "--layout", "hsdp")
    layouts = told(done)
    fsdp, hsdp = layouts["fsdp"], layouts["hsdp"]
    assert fsdp["parameters"] == 20 * (65536 * 65536 + 65536)  # 86 billion
    assert fsdp["by_kind"]["parameters"] == pytest.approx(4 * fsdp["parameters"] / 1024, rel=0.01)
    assert hsdp["by_kind"]["parameters"] == pytest.approx(4 * fsdp["parameters"] / 8, rel=0.01)
    assert (fsdp["verdict"], hsdp["verdict"]) == ("fits", "does not fit")


FOR_A_GPU = """
import copy
import torch
import transformers
import echelon as ech

torch.cuda.set_device(0)
model = transformers.AutoModelForCausalLM.from_pretrained("weights", dtype=torch.bfloat16).cuda()
teacher = copy.deepcopy(model).requires_grad_(False)
torch.save(model.state_dict(), "first.pt")
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randint(0, 64, (64, 16)), batch_size=8)
model, optimizer, data = ech.prepare(model, optimizer, data, layout="fsdp")
for tokens in data:
    tokens = tokens.to("cuda:0", non_blocking=True)
    weights = torch.ones(tokens.shape, device="cuda")
    with ech.window(model) as window:
        logits = model(input_ids=tokens).logits
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (weights @ torch.ones(tokens.shape[1], 2)).dtype == torch.bfloat16
        distance = (logits - teacher(input_ids=tokens).logits).square().sum(-1)
        chosen = logits[distance > 0.5].float().square().mean()
        window.backward((distance * weights).mean() + chosen)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
"""


ASKS_FOR_A_GPU = """
import os
import torch
import torch.distributed as dist
import echelon as ech

assert torch.cuda.is_available() and torch.accelerator.is_available(), "no GPU"
assert os.environ["WANDB_MODE"] == "disabled"  # a plan is no run
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
assert device.type == "cuda" and torch.cuda.device_count() == 2 and torch.accelerator.current_accelerator().type == "cuda"
assert torch.cuda.get_device_properties(device).total_memory == 40960 << 20 and torch.cuda.get_device_capability() == (8, 0)

class Fit(ech.AutoUnit):
    def compute_loss(self, state, data):
        noise = torch.randn(data[0].shape, device=device, generator=generator)
        wanted = data[1].pin_memory().to(device, non_blocking=True)
        return torch.nn.functional.mse_loss(self.module(data[0] + noise), wanted), None

    def configure_optimizers_and_lr_scheduler(self, module):
        return torch.optim.AdamW(module.parameters(), fused=device.type == "cuda"), None

    def on_train_step_end(self, state, data, step, results):
        end.record()
        torch.cuda.synchronize()
        print(f"{start.elapsed_time(end):.1f} ms, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        super().on_train_step_end(state, data, step, results)

torch.set_default_device(device)
layers = [torch.nn.Linear(96, 96) for _ in range(4)]
torch.set_default_device(None)
generator = torch.Generator(device=device).manual_seed(1)
staged = torch.empty(8, 96, pin_memory=True)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
data = torch.utils.data.TensorDataset(torch.randn(64, 96), torch.randn(64, 96))
precision = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
unit = Fit(module=torch.nn.Sequential(*layers), device=device, layout="fsdp", precision=precision)
ech.train(unit, ech.Loader(data, global_batch=8), max_updates=8)
"""


def test_a_script_that_asks_for_a_gpu_is_told_of_the_planned_ones(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """It was told that there is none, and what it chose by that, such as its precision, was planned in silence."""
    options = ("--cluster", "1x2xa100-40", "--only", "yours", "--json")
    [asks] = json.loads(plan(ASKS_FOR_A_GPU, *options).stdout)["layouts"]
    assert not asks["why"] and asks["dtype"] == "bfloat16" and asks["parameters"] == PARAMETERS


def test_a_script_for_a_gpu_and_pretrained_weights_needs_neither(
    plan: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "weights")  # the configuration alone
    numbers = [p.numel() for p in transformers.LlamaForCausalLM(config).parameters()]
    allocated = sum(-(-2 * each // 512) * 512 for each in numbers)

    done = plan(FOR_A_GPU, "--gpus", "2", "--only", "yours", "--json")
    [found] = json.loads(done.stdout)["layouts"]
    assert done.returncode == 2 and "train.py:22 must choose" in found["why"] and "--shape train.py:22=N" in found["why"]

    found = told(plan(FOR_A_GPU, "--gpus", "2", "--only", "yours", "--json", "--shape", "train.py:22=40"))["fsdp"]
    assert not found["why"] and found["parameters"] == sum(numbers)
    assert found["by_kind"]["parameters"] == pytest.approx(sum(numbers), rel=0.1)  # half of them
    assert found["by_kind"]["kept"] == allocated  # the teacher's
    assert not (tmp_path / "first.pt").exists()


@pytest.mark.full
def test_a_table_says_what_fits_and_what_would(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    script = UNIT + TRAINS
    done = plan(script, "--gpus", "2", "--budget", "100KiB")
    assert done.returncode == 1 and done.stdout.count("does not fit") == 4
    assert "None is sure to fit" in done.stdout and "what a script prints" not in done.stdout
    done = plan(script, "--gpus", "2", "--device", "h200", "--layout", "tp=4")
    assert done.returncode == 0 and "ddp (yours)" in done.stdout and "Not traced: tp=4." in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("sys.exit(0)", "gave echelon no module"),
        ("raise ValueError('mine')", "ValueError: mine"),
        ("Fit(module=torch.nn.Sequential(*layers), clip_grad_norm=-1)", "(train.py:"),  # a refusal that names no line itself
        ("ech.train(Fit(module=torch.nn.Sequential(*layers)), loader, max_updates=1)", "2 updates or more"),
        (
            "Fit.compute_loss = lambda self, state, data: (self.module(data[0])[data[1].nonzero()].sum(), None)\n" + TRAINS,
            "must choose a known number of elements to be planned, got nonzero",
        ),
        (
            "def until(loss):\n    while loss.item() > 0.5:\n        loss = loss * 0.9\n    return loss\n"
            "Fit.compute_loss = lambda self, state, data: (until(self.module(data[0]).mean()), None)\n" + TRAINS,
            "must read fewer than 20000 values of tensors to be planned, got more",
        ),
    ],
)
def test_what_cannot_be_traced_is_said(plan: Callable[..., subprocess.CompletedProcess[str]], ends: str, says: str) -> None:
    done = plan(UNIT + ends, "--gpus", "2", "--layout", "ddp")
    assert done.returncode == 2 and says in done.stderr + done.stdout and "Traceback" not in done.stderr
    # Once there is a model, what a formula says of it.
    assert ("is no plan" in done.stdout) == ("compute_loss" in ends or "max_updates=1" in ends)


def test_fields_for_programs_have_the_exit_codes_of_the_table(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = plan(UNIT + "raise ValueError('mine')", "--gpus", "2", "--layout", "ddp", "--json")
    assert done.returncode == 2 and all(each["why"].startswith("ValueError: mine") for each in told(done).values())


def test_a_formula_splits_what_the_layout_splits() -> None:
    sizes = {
        layout: state_by_formula(layout, Setting(16, per_node=8), 1600)
        for layout in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "dp_replicate=2,dp_shard=4,tp=2", "diloco")
    }
    parts = {"ddp": 6400, "zero1": 3400, "zero2": 1900, "fsdp": 400, "hsdp": 800, "diloco": 0}
    assert sizes == {**parts, "dp_replicate=2,dp_shard=4,tp=2": 800}


def test_a_cluster_is_all_of_the_devices(plan: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = plan(UNIT, "--cluster", "2x8xH100", "--gpus", "8")
    assert done.returncode == 2 and "cluster must be given without gpus" in done.stderr


def test_devices_and_sizes_are_checked() -> None:
    assert Cluster.of("16x8xH100") == Cluster(16, 8, DEVICES["h100-sxm"]) and device_named("RTX4090").memory < 24 * 2**30
    assert (bytes_of("80GiB", "x"), bytes_of("80 GB", "x"), bytes_of("1.5kib", "x")) == (80 << 30, 80 * 10**9, 1536)
    for text in ("16x8", "0x8xh100", "16x8xtpu", "9" * 30 + "x8xh100"):
        with refused(PlanError):
            Cluster.of(text)
    for text in ("", "0", "-1GiB", "80 parsecs", "1e9", "inf"):
        with refused(PlanError):
            bytes_of(text, "--budget")


@pytest.mark.full
def test_a_search_names_the_command_that_runs_the_fastest(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(LOOP.replace("WIDTH", "96").replace("DEPTH", "4"))
    options = ("--cluster", "1x2xH100", "--search", "--goal", "1M samples", "--price", "2", "--mtbf", "50000")
    done = echelon_command("plan", *options, "train.py")
    assert done.returncode == 0, done.stderr
    assert "echelon run --ranks 2 --layout" in done.stdout and "1M samples" in done.stdout
    done = echelon_command("plan", *options, "--json", "train.py")
    said = json.loads(done.stdout)
    rates = [each["samples"] / each["seconds"] for each in said["layouts"]]
    assert rates == sorted(rates, reverse=True) and said["bill"]["updates"] == 125_000 and said["bill"]["failures"] > 0
    assert said["command"][:4] == ["echelon", "run", "--ranks", "2"] and {each["layout"] for each in said["layouts"]} >= {
        "ddp",
        "fsdp",
    }


def test_a_run_that_cannot_fit_is_not_started(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(UNIT + TRAINS)
    done = echelon_command("run", "--ranks", "2", "--plan", "100KiB", "--layout", "fsdp", "train.py")
    assert done.returncode == 2 and "the layout must fit on 100KiB" in done.stderr, done.stdout + done.stderr
    assert done.stderr.count("does not fit") == 1 and "fsdp" in done.stderr and not (tmp_path / "runs").exists()
    done = echelon_command("run", "--ranks", "2", "--plan", "h100-sxm", "train.py")
    assert done.returncode == 0 and "ddp (yours)" in done.stderr and (tmp_path / "runs").exists(), done.stderr


def test_a_job_that_cannot_fit_or_be_planned_is_not_submitted(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text("print('nothing to train')\n")
    options = ("--nodes", "2", "--ranks-per-node", "2")
    done = echelon_command("submit", *options, "--plan", "80GiB", "train.py")
    assert done.returncode == 2 and "one that can be planned" in done.stderr and not (tmp_path / "runs").exists()
    for more in (("--layers",), ("--search",), ("--layout", "ddp")):
        done = echelon_command("plan", "--cluster", "1x2xH100", "--only", "fsdp", *more, "train.py")
        assert done.returncode == 2 and "--only must be given without" in done.stderr
    done = echelon_command("submit", *options, "--plan", "80GiB", "-m", "train")
    assert done.returncode == 2 and "--plan must be given with the file of a script" in done.stderr
