"""`echelon plan --layers`: what a layout would do with each layer."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ech
from echelon.common.errors import UsageError
from echelon.parallel import resolve
from echelon.planner.rows import Layers, layers_of
from tests.kit.context_models import LM

Command = Callable[..., subprocess.CompletedProcess[str]]

EXAMPLES = Path(__file__).parents[2] / "examples"


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)


class Tower(nn.Module):
    """Blocks of which one is wider, a tied head, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Mlp(8)) for _ in range(4))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.words.weight


def told(layers: Layers, axis: str) -> dict[str, str]:
    return {row.name: row.told[axis] for row in layers.rows}


def test_every_parameter_counts_once_and_alike_layers_share_a_row() -> None:
    module = Tower()
    layers = layers_of(module, resolve("none"), 1)
    assert sum(row.parameters for row in layers.rows) == sum(p.numel() for p in module.parameters())
    assert [row.name for row in layers.rows] == ["", "words", *(f"blocks.{{0..3}}.{n}" for n in ("0", "1.up", "1.down")), "head"]
    assert layers.rows[-1].parameters == 0  # tied
    assert layers.notes == ["every rank has all layers whole"]


def test_tensor_parallelism_is_what_training_would_do() -> None:
    layers = layers_of(Tower(), ech.Layout(dp_shard=2, tp=2), 4)
    assert layers.layout == "dp_shard=2,tp=2"
    assert told(layers, "tp") == {
        "": "whole",
        "words": "rowwise",
        "blocks.{0..3}.0": "whole",
        "blocks.{0..3}.1.up": "colwise",
        "blocks.{0..3}.1.down": "rowwise",
        "head": "colwise_gather",
    }
    assert "tp: inferred for Tower" in layers.notes
    assert ech.layouts.tp_plan(Tower(), 2)["blocks.*.1.up"] == "colwise"
    for layout, ranks in ((ech.Layout(tp=-1), 2), (ech.Layout(tp=2), 4)):
        assert told(layers_of(Tower(), layout, ranks), "tp") == told(layers, "tp")


def test_stages_split_what_is_alike_and_tied_weights_are_said() -> None:
    layers = layers_of(Tower(), ech.Layout(pp=2), 2)
    assert told(layers, "pp") == {
        "": "every stage",
        "words": "stage 0, rank 0",
        **{f"blocks.{{0..1}}.{n}": "stage 0, rank 0" for n in ("0", "1.up", "1.down")},
        **{f"blocks.{{2..3}}.{n}": "stage 1, rank 1" for n in ("0", "1.up", "1.down")},
        "head": "stage 1, rank 1",
    }
    assert any("words.weight is on ranks 0 and 1 of pp" in note for note in layers.notes)


def test_sharded_blocks_are_those_that_are_gathered_together() -> None:
    fsdp = told(layers_of(Tower(), ech.FSDPStrategy(), 2), "gathered with")
    assert fsdp["blocks.{0..3}.1.up"] == "blocks.*" and fsdp["words"] == "the root"
    chosen = told(layers_of(Tower(), ech.FSDPStrategy(blocks=[Mlp]), 2), "gathered with")
    assert chosen["blocks.{0..3}.1.up"] == "blocks.*.1" and chosen["blocks.{0..3}.0"] == "the root"
    assert told(layers_of(Tower(), ech.FSDPStrategy(), 2), "gathered with") == fsdp
    assert (
        told(layers_of(Tower(), ech.FSDPStrategy(sharding_strategy="HYBRID_SHARD", blocks=[Mlp]), 2), "gathered with") == chosen
    )


def test_experts_and_sequences() -> None:
    module = nn.Sequential(nn.Linear(8, 8), ech.nn.MoE(8, ech.nn.GroupedExperts(8, 16, 4)))
    rows = told(layers_of(module, ech.Layout(ep=2), 2), "ep")
    assert rows["1.experts"] == "2 of 4 experts" and rows["0"] == "as the rest"
    assert any("1/2 of each sequence" in note for note in layers_of(LM(), ech.Layout(cp=2), 2).notes)


@pytest.mark.parametrize(
    ("layout", "ranks", "says"),
    [
        (ech.Layout(tp=3), 3, "does not divide"),
        (ech.Layout(pp=8), 8, "too few for 8 stages"),
        (ech.Layout(ep=2), 2, "no layer of experts that ep can divide"),
        (ech.Layout(dp_shard=2, tp=2), 6, "dp_shard"),
        (ech.Layout(tp=2, plan={"blocks.*.q": "colwise"}), 2, "matches no submodule"),
    ],
)
def test_what_training_refuses_is_refused(layout: ech.Strategy, ranks: int, says: str) -> None:
    module = Tower()
    if "does not divide" in says:
        layout = ech.Layout(tp=3, plan={"blocks.*.1.up": "colwise", "blocks.*.1.down": "rowwise"})
    with pytest.raises(UsageError, match=says):
        layers_of(module, layout, ranks)


def test_plans_of_transformers_are_named_with_what_they_leave_whole() -> None:
    tf = pytest.importorskip("transformers", reason="needs `pip install transformers`")
    size = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tf.Qwen3MoeConfig(**size, intermediate_size=64, moe_intermediate_size=16, num_experts=4)
    with torch.device("meta"):
        module = tf.Qwen3MoeForCausalLM(config)
    layers = layers_of(module, ech.Layout(tp=-1), 2)
    tp = told(layers, "tp")
    assert layers.notes[0] == "tp: as transformers says of Qwen3MoeForCausalLM" and "experts whole" in layers.notes[1]
    assert tp["model.layers.{0..1}.self_attn.q_proj"] == "colwise" and tp["model.layers.{0..1}.self_attn.q_norm"] == "summed"
    assert tp["model.layers.{0..1}.mlp.experts"] == "whole" and layers.styles[-1] == "summed"


OWN_LOOP = """
import torch, sys
import echelon as ech
print("made by", sys.argv[1])
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
layout = ech.Layout(tp=-1, plan={"0": "colwise", "2": "rowwise"})
net, optimizer, data = ech.prepare(net, optimizer, [torch.zeros(2, 4)] * 3, layout=layout)
for epoch in ech.epochs(net, 2):
    raise SystemExit("it trains")
"""

OWN_UNIT = """
import torch
import echelon as ech
device = ech.init_from_env()
net = ech.layouts.prepare_module(torch.nn.Linear(4, 2), device, layout="fsdp")
print("not this")
"""


def test_a_loop_of_ones_own_is_run_up_to_where_it_trains(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(OWN_LOOP)
    done = echelon_command("plan", "--layers", "train.py", "me")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Sequential on 2 ranks by tp=2: 58 parameters" and "made by me" in done.stderr
    assert [line.split() for line in lines if line.startswith(("0", "2"))] == [
        ["0", "Linear", "40", "colwise"],
        ["2", "Linear", "18", "rowwise"],
    ]
    assert "rowwise: its inputs are split" in done.stdout
    other = echelon_command("plan", "--layers", "--layout", "dp_shard=2,tp=3", "train.py", "me")
    assert other.returncode == 2 and "does not divide" in other.stderr, other.stderr  # by the script's own plan


LIGHTNING = """
import torch
import echelon.compat.lightning as L

class Fit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def training_step(self, batch, i):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

L.Trainer(max_epochs=1, strategy="fsdp", devices=2).fit(Fit(), [torch.zeros(2, 4)])
"""


def test_a_trainer_that_would_start_ranks_goes_on_in_this_process(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = echelon_command("plan", "--layers", "--ranks", "4", "train.py")
    assert done.returncode == 0 and "Fit on 4 ranks by fsdp: 10 parameters" in done.stdout, done.stderr


def test_a_unit_of_ones_own_and_examples(tmp_path: Path, echelon_command: Command) -> None:
    (tmp_path / "train.py").write_text(OWN_UNIT)
    done = echelon_command("plan", "--layers", "--layout", "none", "train.py")
    assert done.returncode == 0 and "every rank has all layers whole" in done.stdout, done.stderr
    (tmp_path / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())
    done = echelon_command("plan", "--layers", "--layout", "pp=2,tp=2", "gpt.py")
    assert done.returncode == 0, done.stderr
    assert "GPT on 4 ranks by pp=2,tp=2" in done.stdout and "blocks.{2..3}.qkv" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("print('nothing')", (), "gave echelon no module"),
        ("raise SystemExit(3)", (), ""),
        (OWN_UNIT, ("--layout", "zero9"), "zero9"),
        (OWN_UNIT, ("--ranks", "0"), "--ranks must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, echelon_command: Command, text: str, options: tuple[str, ...], says: str) -> None:
    (tmp_path / "train.py").write_text(text)
    done = echelon_command("plan", "--layers", *options, "train.py")
    assert done.returncode in (2, 3) and says in done.stderr and "Traceback" not in done.stderr, done.stderr
