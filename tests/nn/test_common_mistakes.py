"""What common mistakes are told: the rule, the value, and what to do."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn, optim

import speedtorch


def adam(embedding: nn.Module) -> optim.Optimizer:
    return optim.Adam(embedding.parameters())


def two() -> nn.ModuleDict:
    return nn.ModuleDict({name: speedtorch.Embedding(10, 4) for name in ("users", "films")})


def swapped() -> None:
    embedding = speedtorch.Embedding(10, 4)
    speedtorch.attach(embedding, adam(embedding))  # type: ignore[arg-type]


def keys_by_name() -> None:
    ids = torch.tensor([1])
    named = {"users": ids, "films": ids}
    list(speedtorch.prefetch([ids], two(), ids=lambda _: named))


def in_torchrecs_order() -> None:
    tables = [speedtorch.EmbeddingBagConfig(10, 4, "users")]
    speedtorch.EmbeddingBagCollection("cpu", tables)  # type: ignore[arg-type]


def closed() -> None:
    embedding = speedtorch.Embedding(10, 4)
    embedding.table.close()
    embedding(torch.tensor([1]))


def a_list_of_modules() -> None:
    modules = two()
    optimizer = optim.Adam(modules.parameters())
    speedtorch.attach(optimizer, list(modules.values()))  # type: ignore[arg-type]


def attached_to_one_of_two() -> None:
    modules = two()
    optimizer = optim.Adam(modules.parameters())
    speedtorch.attach(optimizer, modules["users"])
    modules["films"](torch.tensor([1])).sum().backward()
    optimizer.step()


def one_table_looked_up(*names: str) -> None:
    tables = [speedtorch.EmbeddingBagConfig(10, 4, name) for name in names]
    speedtorch.EmbeddingBagCollection(tables).embedding_bags["users"](torch.tensor([1]))


def a_key_by_name() -> None:
    embedding, ids = speedtorch.Embedding(10, 4), torch.tensor([1])
    list(speedtorch.prefetch([ids], embedding, ids=lambda _: {"users": ids}))


def collection() -> speedtorch.EmbeddingBagCollection:
    tables = [speedtorch.EmbeddingBagConfig(10 * (k + 1), 4, f"t{k}") for k in range(2)]
    return speedtorch.EmbeddingBagCollection(tables, device="cpu")


def offsets_without_the_last() -> None:
    ids = torch.tensor([1, 2])
    collection()({f"t{k}": (ids, torch.tensor([0])) for k in range(2)})


def a_weight_saved_a_second_time() -> None:
    model = nn.ModuleDict({"words": speedtorch.Embedding(10, 4)})
    model.register_parameter("out", model["words"].weight)
    torch.save(model.state_dict(), io.BytesIO())


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (swapped, TypeError, r"attach: expected an optimizer and a module, .* got Embedding, Adam"),
    (
        keys_by_name,
        ValueError,
        r"dict by module, .* got dict with the keys \['users', 'films'\]. .* \{model.users: ids\}",
    ),
    (in_torchrecs_order, TypeError, r"tables: expected a list of .* got a str in the list"),
    (
        lambda: speedtorch.EmbeddingBagCollection([{"name": "users"}]),  # type: ignore[list-item]
        TypeError,
        r"tables: expected a list of .* got a dict in the list, which has no 'name'",
    ),
    (
        lambda: speedtorch.EmbeddingBagCollection(
            [speedtorch.EmbeddingBagConfig(10, 4, "users", feature_names="ages")]  # type: ignore[arg-type]
        ),
        TypeError,
        "users: feature_names: expected a list of names, got 'ages'",
    ),
    (
        lambda: speedtorch.Embedding(10, 4)(torch.tensor([1.0])),
        RuntimeError,
        r"got torch.float32 of shape \[1\]. Convert them with ids.long\(\)",
    ),
    (
        a_key_by_name,
        ValueError,
        r"Embedding: expected ids, got a dict with the keys \['users'\]",
    ),
    (
        lambda: collection().resize("t1", 10),
        ValueError,
        r"table 't1' has 20 rows, and resize\(10\) would drop 10 of them",
    ),
    (offsets_without_the_last, ValueError, r"the last is 0. .* append len\(ids\)"),
    (a_weight_saved_a_second_time, NotImplementedError, "a second time, .* delete the key"),
    (lambda: copy.copy(speedtorch.Embedding(10, 4)), TypeError, "copy.copy.* use copy.deepcopy"),
    (
        lambda: speedtorch.Embedding(10, 4)(torch.eye(2).to_sparse().long()),
        RuntimeError,
        r"in torch.sparse_coo. Pass ids.to_dense\(\)",
    ),
    (a_list_of_modules, TypeError, r"got Adam, list. Pass several modules as one nn.ModuleList"),
    (
        attached_to_one_of_two,
        RuntimeError,
        r"only other tables are attached: .* Nothing was stepped."
        r" Call speedtorch.attach\(optimizer, model\) again",
    ),
    (
        lambda: speedtorch.EmbeddingBagCollection(
            [speedtorch.EmbeddingBagConfig("users", 10, 4)]  # type: ignore[arg-type]
        ),
        ValueError,
        r"got 4. Write EmbeddingBagConfig\(num_embeddings=, embedding_dim=, name=\)",
    ),
    (
        lambda: speedtorch.Embedding.from_pretrained(np.zeros((3, 2))),  # type: ignore[arg-type]
        TypeError,
        "got ndarray. Convert it with torch.as_tensor",
    ),
    (
        lambda: speedtorch.Embedding.from_pretrained("rows.pt"),
        ValueError,
        r"embeddings: cannot read rows.pt. Pass torch.load\(path\)\[key\]",
    ),
    (
        lambda: speedtorch.nearest_neighbors(speedtorch.Embedding(10, 4), torch.zeros(4), k=2),
        ValueError,
        r"got \[4\] of torch.strided. For a single vector, pass queries\[None\]",
    ),
    (
        lambda: one_table_looked_up("users"),
        NotImplementedError,
        r"table 'users': a collection looks up all its tables together. Call it with a dict",
    ),
    (
        lambda: one_table_looked_up("users", "films"),
        NotImplementedError,
        r"tables 'users', 'films': a collection looks up all its tables together",
    ),
    (
        lambda: speedtorch.cache("4GiB", two()),  # type: ignore[arg-type]
        TypeError,
        "cache: expected an nn.Module and bytes, in this order, got str, ModuleDict",
    ),
    (
        lambda: speedtorch.Embedding(10, 4)(torch.tensor([1], device="meta")),
        NotImplementedError,
        "ids on the meta device have no values",
    ),
    (
        lambda: speedtorch.detach(adam(speedtorch.Embedding(10, 4))),
        ValueError,
        r"Adam is not attached. Pass detach\(\) the optimizer that was passed to attach",
    ),
    (
        lambda: setattr(speedtorch.Embedding(10, 4), "padding_idx", 3),
        NotImplementedError,
        "Embedding: padding_idx cannot be changed from None to 3, .* with padding_idx=3, and load",
    ),
    (
        lambda: setattr(speedtorch.EmbeddingBag(10, 4, padding_idx=-1), "padding_idx", None),
        NotImplementedError,
        "EmbeddingBag: padding_idx cannot be changed from 9 to None",
    ),
    (
        lambda: setattr(speedtorch.Embedding(10, 4, stored=torch.bfloat16), "rounding", "nearest"),
        NotImplementedError,
        "rounding cannot be changed from 'stochastic' to 'nearest'",
    ),
    (closed, ValueError, r"this table is closed\. Close a table after its last use"),
]


@pytest.mark.parametrize(("mistake", "kind", "message"), MISTAKES)
def test_a_mistake_is_reported_with_its_remedy(
    mistake: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        mistake()


@pytest.mark.parametrize("kind", [speedtorch.Embedding, speedtorch.EmbeddingBag])
def test_a_gpu_where_there_is_none_is_refused(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = r"device='cuda:0' needs a GPU, but torch finds none. Use device='cpu'"
    with pytest.raises(RuntimeError, match=told):
        kind(10, 4, device="cuda:0")
