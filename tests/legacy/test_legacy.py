"""A word2vec script as people wrote them for SpeedTorch in 2019, with its name and nothing else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import speedtorch as SpeedTorch
from speedtorch import legacy

CLASSES, WIDTH, BATCH, POSITIVES, NEGATIVES = 50, 8, 16, 2, 5


class SkipGram(nn.Module):
    """Skip-gram with negative sampling over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(BATCH, WIDTH)
        self.v_embeddings = nn.Embedding(BATCH * (POSITIVES + NEGATIVES), WIDTH)

    def forward(self, pos_u: Any, pos_v: Any, neg_v: Any) -> torch.Tensor:
        device = self.u_embeddings.weight.device
        u, v, n = (torch.as_tensor(ids, device=device) for ids in (pos_u, pos_v, neg_v))
        words = self.u_embeddings(u).transpose(1, 2)
        good = torch.bmm(self.v_embeddings(v), words)
        bad = torch.bmm(self.v_embeddings(n), words)
        return -(F.logsigmoid(good).sum() + F.logsigmoid(-bad).sum()) / len(u)


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Words, their neighbours (the words near by in number) and random words."""
    random = np.random.default_rng(0)
    result = []
    for _ in range(steps):
        words = random.integers(0, CLASSES, (BATCH, 1))
        near = (words + random.integers(1, 3, (BATCH, POSITIVES))) % CLASSES
        result.append((words, near, random.integers(0, CLASSES, (BATCH, NEGATIVES))))
    return result


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.02, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("CPUPinn", [False, True], ids=["device", "pinned"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_script_of_2019_runs_and_learns(make: Any, CPUPinn: bool, device: str) -> None:
    torch.manual_seed(0)
    skip_gram_modelSparse = SkipGram().to(device)
    given_optimizer = make(skip_gram_modelSparse.parameters())

    uEmbed_switcher = SpeedTorch.ModelFactory(
        skip_gram_modelSparse.u_embeddings,
        total_classes=CLASSES,
        embed_dimension=WIDTH,
        datatype="float32",
        CPUPinn=CPUPinn,
    )
    vEmbed_switcher = SpeedTorch.ModelFactory(
        skip_gram_modelSparse.v_embeddings, CLASSES, WIDTH, "float32", CPUPinn
    )
    uOptimizer_switcher = SpeedTorch.OptimizerFactory(
        given_optimizer,
        CLASSES,
        WIDTH,
        skip_gram_modelSparse,
        "u_embeddings",
        dtype="float32",
        CPUPinn=CPUPinn,
    )
    vOptimizer_switcher = SpeedTorch.OptimizerFactory(
        given_optimizer, CLASSES, WIDTH, skip_gram_modelSparse, "v_embeddings", "float32", CPUPinn
    )

    uEmbed_switcher.uniformDistributionInit(-0.5 / WIDTH, 0.5 / WIDTH)
    vEmbed_switcher.zerosInit()
    uOptimizer_switcher.optInit()
    vOptimizer_switcher.optInit()

    pos_u_input = uEmbed_switcher.variableTransformer(BATCH, 1)
    pos_v_input, neg_v_input = vEmbed_switcher.variableTransformer(BATCH, POSITIVES, NEGATIVES)

    losses = []
    for pos_u, pos_v, neg_v in batches(60):
        uEmbed_switcher.beforeForwardPass(retrievedPosIndexes=pos_u)
        vEmbed_switcher.beforeForwardPass(retrievedPosIndexes=pos_v, retrievedNegIndexes=neg_v)
        uOptimizer_switcher.beforeForwardPass(retrievedPosIndexes=pos_u)
        vOptimizer_switcher.beforeForwardPass(retrievedPosIndexes=pos_v, retrievedNegIndexes=neg_v)

        given_optimizer.zero_grad()
        loss = skip_gram_modelSparse(pos_u_input, pos_v_input, neg_v_input)
        loss.backward()
        given_optimizer.step()
        losses.append(loss)

        uEmbed_switcher.afterOptimizerStep(pos_u)
        vEmbed_switcher.afterOptimizerStep(pos_v, neg_v)
        uOptimizer_switcher.afterOptimizerStep(pos_u)
        vOptimizer_switcher.afterOptimizerStep(pos_v, neg_v)

    trained = uEmbed_switcher.getNumpyVersion()
    assert trained.shape == (CLASSES, WIDTH)
    assert np.isfinite(trained).all()
    first, last = (torch.stack(part).mean().item() for part in (losses[:5], losses[-5:]))
    assert last < 0.9 * first


ARGUMENTS = {
    "ModelFactory": "model_variable total_classes embed_dimension datatype",
    "OptimizerFactory": "given_optimizer total_classes embed_dimension model variable_name dtype",
    "DataGadget": "fileName",
    "COM": "total_classes datatype",
}
PLACES = {"": " CPUPinn", "GPUPytorch": "", "CPUPytorch": "", "Pytorch": " deviceType pinType"}
EXPECTED = {
    f"{place}{kind}": ARGUMENTS[kind] + PLACES[place] for kind in ARGUMENTS for place in PLACES
}
EXPECTED |= {f"{kind}MM": f"{arguments} CPUPinn" for kind, arguments in ARGUMENTS.items()} | {
    "ModelFactoryMM": "model_variable total_classes embed_dimension diskname datatype CPUPinn",
    "COMMM": "total_classes diskname datatype CPUPinn",
}
DEFAULTS = {
    "CPUPinn": False,
    "deviceType": "cuda",
    "pinType": False,
    "diskname": {"ModelFactoryMM": "variable", "COMMM": "COM"},
}


def test_every_class_of_2019_is_exported() -> None:
    assert set(legacy.__all__) == set(EXPECTED)
    for name in EXPECTED:
        assert getattr(SpeedTorch, name) is getattr(legacy, name)


@pytest.mark.parametrize("name", EXPECTED)
def test_positional_arguments_have_the_order_and_defaults_of_2019(name: str) -> None:
    parameters = inspect.signature(getattr(SpeedTorch, name)).parameters
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert " ".join(p.name for p in positional) == EXPECTED[name]
    for parameter in positional:
        if parameter.name in DEFAULTS:
            default = DEFAULTS[parameter.name]
            assert parameter.default == (default[name] if isinstance(default, dict) else default)
        if parameter.name in ("datatype", "dtype"):
            numpys = {True: ("float32", "int32"), False: (torch.float32, torch.int32)}
            assert parameter.default in numpys["Pytorch" not in name]


METHODS = {
    "ModelFactory": (
        "zerosInit uniformDistributionInit normalDistributionInit variableTransformer"
        " beforeForwardPass afterOptimizerStep getNumpyVersion"
    ),
    "OptimizerFactory": "optInit beforeForwardPass afterOptimizerStep getNumpyVersion",
    "DataGadget": "gadgetInit getData insertData getNumpyVersion",
    "COM": "comInit getNumpyVersion",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_every_method_of_2019_is_there(name: str) -> None:
    kind = name.removeprefix("GPU").removeprefix("CPU").removeprefix("Pytorch").removesuffix("MM")
    methods = METHODS[kind].split()
    if "Pytorch" in name:
        methods += ["saveTorch", "loadTorch", "getTorchVar"]
        methods += ["customInit"] if kind == "ModelFactory" else []
    else:
        methods += ["saveCupy", "loadCupy", "getCupyVar"]
        methods += ["getCupyMM"] if name.endswith("MM") else []
    for method in methods:
        documented = inspect.getdoc(getattr(getattr(SpeedTorch, name), method))
        assert documented, method


def test_errors_of_missing_or_surplus_arguments_name_the_class() -> None:
    layer = nn.Embedding(3, 2)
    missing = r"^ModelFactory: missing .*: 'total_classes'\. The signature is \(model_variable"
    with pytest.raises(TypeError, match=missing):
        SpeedTorch.ModelFactory(layer)
    with pytest.raises(TypeError, match=r"^GPUPytorchModelFactory: .*'CPUPinn'"):
        SpeedTorch.GPUPytorchModelFactory(layer, 3, 2, CPUPinn=True)


def test_a_class_of_the_users_has_a_constructor_of_its_own() -> None:
    class Counts(SpeedTorch.COM):
        def __init__(self, classes: int) -> None:
            super().__init__(classes, "int64")

    assert list(inspect.signature(Counts).parameters) == ["classes"]
    counts = Counts(3)
    counts.comInit()
    assert counts.getNumpyVersion().dtype == "int64"
