"""Parameters and memory per rank, tables and the picture: closed forms, no processes."""

from __future__ import annotations

import io

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from rich.console import Console
from torch import nn

from lightning_hetero.errors import HeteroError
from lightning_hetero.layout import Layouts, ModuleLayout, resolve_layouts
from lightning_hetero.report import (
    MemoryEstimate,
    draw_layout,
    estimate_memory,
    groups_per_rank,
    layout_table,
    local_numel,
    memory_table,
    parameters_per_rank,
    print_layout,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


class Encoder(nn.Module):
    tensor_parallel_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))


class LanguageModel(Encoder):
    tensor_parallel_plan = Encoder.tensor_parallel_plan | {
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, width: int = 8, depth: int = 2, vocabulary: int = 32) -> None:
        super().__init__(width, depth)
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight


class Model(nn.Module):
    """Parameters: vision 3 * 2 * 64 = 384; llm 2 * 2 * 256 + 256 + 2 * 8 = 1296; outside 7."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = Encoder()
        self.llm = LanguageModel()
        self.scale = nn.Parameter(torch.ones(7))


def layouts_of(world_size: int = 4, **layouts: ModuleLayout) -> Layouts:
    return resolve_layouts(layouts, "llm", world_size)


@pytest.fixture
def two_layouts() -> Layouts:
    return layouts_of(vision=ModuleLayout(), llm=ModuleLayout(tensor_parallel_size=2))


@pytest.mark.parametrize("shape", [(8, 6), (7, 4), (3, 5), (1,), (5,), (2, 3, 4)])
@pytest.mark.parametrize("tensor_dim", [None, 0, -1])
@pytest.mark.parametrize("shard_size", [1, 2, 4])
def test_local_numel_is_what_chunk_leaves(shape: tuple[int, ...], tensor_dim: int | None, shard_size: int) -> None:
    layouts = layouts_of(8, llm=ModuleLayout(tensor_parallel_size=2, shard_size=shard_size))
    layout = layouts.driver
    for rank in range(8):
        _, _, shard, _, tensor = layout.coordinate(rank)
        expected = torch.empty(shape)
        for dim, size, index in ((tensor_dim, 2, tensor), (0, shard_size, shard)):
            if dim is not None:
                chunks = expected.chunk(size, dim)
                expected = chunks[index] if index < len(chunks) else expected.narrow(dim, 0, 0)
        assert local_numel(shape, tensor_dim=tensor_dim, layout=layout, rank=rank) == expected.numel()


def test_local_numel_without_sharding_and_without_the_module() -> None:
    layout = layouts_of(8, llm=ModuleLayout(ranks="0-3")).driver
    assert local_numel((8, 3), tensor_dim=None, layout=layout, rank=3) == 6
    assert local_numel((8, 3), tensor_dim=None, layout=layout, rank=3, sharded=False) == 24
    assert local_numel((), tensor_dim=None, layout=layout, rank=3) == 1
    assert local_numel((8, 3), tensor_dim=None, layout=layout, rank=4) == 0


def test_parameters_per_rank(two_layouts: Layouts) -> None:
    # llm: all but the norm is halved by the tensor axis and then by FSDP2; tied weights count once.
    llm = (2 * 2 * 256 + 256) // 4 + 2 * 8 // 2
    assert parameters_per_rank(Model(), two_layouts) == {"vision": [96] * 4, "llm": [llm] * 4, "": [7] * 4}


def test_parameters_per_rank_of_disjoint_modules() -> None:
    layouts = layouts_of(6, vision=ModuleLayout(ranks="4-5"), llm=ModuleLayout(ranks="0-3", shard_size=1))
    expected = {"vision": [0] * 4 + [192] * 2, "llm": [1296] * 4 + [0] * 2, "": [7] * 4 + [0] * 2}
    assert parameters_per_rank(Model(), layouts) == expected


def test_trainable_parameters_per_rank(two_layouts: Layouts) -> None:
    model = Model()
    model.vision.requires_grad_(False)
    trainable = parameters_per_rank(model, two_layouts, trainable_only=True)
    assert trainable["vision"] == [0] * 4
    assert trainable["llm"] == parameters_per_rank(model, two_layouts)["llm"]


def test_parameters_on_the_meta_device_are_counted(two_layouts: Layouts) -> None:
    with torch.device("meta"):
        model = Model()
    assert parameters_per_rank(model, two_layouts) == parameters_per_rank(Model(), two_layouts)


def test_memory_of_weights_gradients_and_optimizer() -> None:
    layouts = layouts_of(2, vision=ModuleLayout(shard_size=1), llm=ModuleLayout(shard_size=1))
    model = Model()
    model.vision.requires_grad_(False)
    first, second = estimate_memory(model, layouts)
    total, trainable = 384 + 1296 + 7, 1296 + 7
    assert (first.weights, first.gradients, first.optimizer) == (4 * total, 4 * trainable, 8 * trainable)
    assert first.gathered == 0
    assert (first.rank, second.rank) == (0, 1)
    assert estimate_memory(model, layouts, optimizer_states=0)[0].optimizer == 0


@pytest.mark.parametrize(
    ("precision", "weight", "gradient"),
    [("32-true", 4, 4), (32, 4, 4), (None, 4, 4), ("64-true", 8, 8), ("bf16-true", 2, 2), ("bf16-mixed", 6, 4)],
)
def test_memory_by_precision(precision: str | int | None, weight: int, gradient: int) -> None:
    layouts = layouts_of(1, vision=ModuleLayout(), llm=ModuleLayout())
    estimate = estimate_memory(Model(), layouts, precision=precision)[0]
    assert (estimate.weights, estimate.gradients) == (weight * 1687, gradient * 1687)


def test_unknown_precision_is_an_error(two_layouts: Layouts) -> None:
    with pytest.raises(HeteroError, match=r"trainer\.precision: no memory estimate for 'fp4'; choose one of 64-true"):
        estimate_memory(Model(), two_layouts, precision="fp4")


def test_memory_of_gathered_units() -> None:
    layouts = layouts_of(4, vision=ModuleLayout(shard_size=1), llm=ModuleLayout(tensor_parallel_size=2))
    # Embedding and norm stay whole over the step, two blocks at a time; halves, where the tensor axis splits.
    assert estimate_memory(Model(), layouts)[0].gathered == 4 * (256 // 2 + 16 + 2 * 512 // 2)
    layouts = layouts_of(4, vision=ModuleLayout(reshard_after_forward=False), llm=ModuleLayout(shard_size=1))
    assert estimate_memory(Model(), layouts)[0].gathered == 4 * 384


def test_memory_of_activations_and_logits() -> None:
    layouts = layouts_of(4, vision=ModuleLayout(), llm=ModuleLayout(tensor_parallel_size=2))
    tokens = {"vision": 100, "llm": 10}
    estimate = estimate_memory(Model(), layouts, precision="bf16-true", tokens=tokens)[0]
    # Two driver replicas' 200 vision tokens are encoded by four replicas.
    assert estimate.activations == 3 * 50 * 4 * 34 + 2 * 10 * 8 * (10 + 24 // 2)
    assert estimate.logits == 3 * 10 * 32 * 2
    assert estimate.unknown == ()
    in_float32 = estimate_memory(Model(), layouts, tokens=tokens)[0]
    assert (in_float32.activations, in_float32.logits) == (2 * estimate.activations, 2 * estimate.logits)


def test_memory_of_activations_with_recomputation_and_context() -> None:
    layouts = layouts_of(2, llm=ModuleLayout(activation_checkpointing="full", context_parallel_size=2))
    estimate = estimate_memory(Model(), layouts, precision="bf16-true", tokens={"llm": 10})[0]
    assert estimate.activations == 5 * (2 * 8 * 2 + 8 * 34)
    layouts = layouts_of(2, llm=ModuleLayout(tensor_parallel_size=2, sequence_parallel=True))
    estimate = estimate_memory(Model(), layouts, precision="bf16-true", tokens={"llm": 10})[0]
    assert estimate.activations == 2 * 10 * 8 * 34 // 2


def test_frozen_encoder_keeps_no_activations(two_layouts: Layouts) -> None:
    model = Model()
    model.vision.requires_grad_(False)
    frozen = estimate_memory(model, two_layouts, tokens={"llm": 10})[0]
    assert frozen.unknown == ()
    assert frozen.activations == estimate_memory(Model(), two_layouts, tokens={"llm": 10})[0].activations


def test_what_cannot_be_estimated_is_named(two_layouts: Layouts) -> None:
    estimates = estimate_memory(Model(), two_layouts)
    assert estimates[0].unknown == ("activations of vision", "activations of llm", "logits of llm")
    text = render(memory_table(estimates))
    assert "not known and not counted: activations of vision, activations of llm, logits of llm" in text


def test_memory_table_joins_equal_neighbours() -> None:
    estimates = [MemoryEstimate(rank=0, weights=1_500_000), *(MemoryEstimate(rank=rank) for rank in (1, 2, 3))]
    text = render(memory_table(estimates))
    assert [line.split()[1] for line in text.splitlines() if line.startswith("│")] == ["0", "1-3"]
    assert "1.50" in text


def render(table: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(table)
    return console.file.getvalue()


def test_layout_table(two_layouts: Layouts) -> None:
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in render(layout_table(Model(), two_layouts)).splitlines()
        if line.startswith("│")
    ]
    assert rows == [
        ["vision", "vision", "data 4 (shard 4) x tensor 1", "0-3", "384", "96", "3"],
        ["llm *", "llm", "data 2 (shard 2) x tensor 2", "0-3", "1,296", "328", "3"],
        ["(outside)", "", "replicated", "0-3", "7", "7", "3"],
    ]


def test_layout_table_shows_ranges_of_what_differs() -> None:
    layouts = layouts_of(4, vision=ModuleLayout(ranks="2-3"), llm=ModuleLayout(ranks="0-2", tensor_parallel_size=1))
    text = render(layout_table(Model(), layouts))
    # 32 and 8 rows over three ranks: 11, 11, 10 and 3, 3, 2.
    assert "372-462" in text
    assert groups_per_rank(layouts) == [2, 2, 3, 2]


def test_print_layout_does_not_fold_when_written_to_a_file(
    two_layouts: Layouts, capsys: pytest.CaptureFixture[str]
) -> None:
    print_layout(Model(), two_layouts)
    assert "data 2 (shard 2) x tensor 2" in capsys.readouterr().out


def test_picture_has_one_colour_for_each_replica(two_layouts: Layouts, tmp_path) -> None:
    path = tmp_path / "new" / "layout.svg"
    draw_layout(two_layouts, path)
    text = path.read_text()
    assert text.lstrip().startswith("<?xml")
    # Replica 0 is one rank of vision and two of the driver, replica 2 exists in vision only.
    assert text.count("fill: #a6cee3") == 3
    assert text.count("fill: #fdbf6f") == 1
    assert "#f2f2f2" not in text


def test_picture_shows_absent_ranks_and_large_worlds(tmp_path) -> None:
    layouts = layouts_of(128, vision=ModuleLayout(ranks="96-127"), llm=ModuleLayout(ranks="0-95"))
    draw_layout(layouts, tmp_path / "layout.svg")
    assert (tmp_path / "layout.svg").read_text().count("fill: #f2f2f2") == 128
    draw_layout(layouts, tmp_path / "layout.png")
    assert (tmp_path / "layout.png").read_bytes().startswith(b"\x89PNG")


def test_picture_with_an_unknown_suffix_is_an_error(two_layouts: Layouts, tmp_path) -> None:
    with pytest.raises(HeteroError, match=r"picture: cannot write 'layout\.docx'; use one of the suffixes .*svg"):
        draw_layout(two_layouts, tmp_path / "layout.docx")


def test_picture_leaves_no_global_state(two_layouts: Layouts, tmp_path) -> None:
    before = pyplot.get_fignums(), dict(matplotlib.rcParams)
    draw_layout(two_layouts, tmp_path / "layout.png")
    assert (pyplot.get_fignums(), dict(matplotlib.rcParams)) == before
