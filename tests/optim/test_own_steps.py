"""An optimizer's own step function sees the step's rows; all code around it sees the weight."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import NEEDS_GPU
from interrupts import PACKAGE, every_interrupt, source_files
from reference import assert_same_bytes
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_checkpoints import through_a_file

import speedtorch
from speedtorch.optim import step_hooks
from speedtorch.step.sparse_rows import SparseRows

ROWS, WIDTH = 10, 2
STEP_HOOKS = source_files("optim/step_hooks.py")


def rows() -> Tensor:
    return torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH)


def pair(make: Any, device: str = "cpu", **settings: Any) -> list[tuple[Any, Any]]:
    """torch's module and ours, and an optimizer of each."""
    made = []
    for kind in (nn.Embedding, speedtorch.Embedding):
        module = kind(ROWS, WIDTH)
        module.load_state_dict({"weight": rows()})
        optimizer = make(module.to(device).parameters(), **settings)
        if kind is speedtorch.Embedding and make is not optim.SGD:
            speedtorch.attach(optimizer, module)
        made.append((module, optimizer))
    return made


def train(module: Any, optimizer: Any) -> None:
    for ids in ([4, 7], [5, 7, 9]):
        module(torch.tensor(ids, device=module.weight.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(pairs: list[tuple[Any, Any]]) -> None:
    (theirs, _), (ours, _) = pairs
    torch.testing.assert_close(ours.state_dict()["weight"].cpu(), theirs.weight.detach().cpu())


WRITES: dict[str, Callable[[Any], object]] = {
    "clamp": lambda weight: weight.clamp_(-1, 1),
    "row": lambda weight: weight.__setitem__(0, 0.0),
    "rows": lambda weight: weight.data[:2].zero_(),
    "normalize": lambda weight: setattr(weight, "data", nn.functional.normalize(weight.data)),
    "data": lambda weight: weight.data.mul_(0.5),
}


@pytest.mark.parametrize("make", [optim.SGD, optim.Adagrad])
@pytest.mark.parametrize("when", ["pre", "post", "global"])
@pytest.mark.parametrize("write", WRITES)
def test_hooks_write_to_all_rows(write: str, when: str, make: Any) -> None:
    pairs = pair(make, lr=0.1)
    for module, optimizer in pairs:

        def hook(*_: object, weight: Any = module.weight) -> None:
            with torch.no_grad():
                WRITES[write](weight)

        register = {
            "pre": optimizer.register_step_pre_hook,
            "post": optimizer.register_step_post_hook,
            "global": register_optimizer_step_post_hook,
        }[when]
        handle = register(hook)
        try:
            train(module, optimizer)
        finally:
            handle.remove()
    assert_same(pairs)


class Projected(optim.Adagrad):
    """Adagrad whose rows are changed after each step."""

    project: Callable[[Any], object] = staticmethod(lambda weight: None)

    def step(self, closure: Any = None) -> Any:
        loss = self.base_step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    type(self).project(weight)
        return loss

    def base_step(self, closure: Any) -> Any:
        return super().step(closure)


class ProjectedByName(Projected):
    """As Projected, and names the class whose step it calls."""

    def base_step(self, closure: Any) -> Any:
        return optim.Adagrad.step(self, closure)


@pytest.mark.parametrize("hooked", [False, True], ids=["base unused", "base used"])
@pytest.mark.parametrize("kind", [Projected, ProjectedByName])
@pytest.mark.parametrize("write", WRITES)
def test_code_around_the_base_class_step_sees_all_rows(write: str, kind: Any, hooked: bool) -> None:
    class Own(kind):  # type: ignore[misc]
        project = staticmethod(WRITES[write])

    if hooked:  # torch wraps the step function of a class when an object of it is made
        optim.Adagrad([nn.Parameter(torch.ones(1))])
    pairs = pair(Own, lr=0.1)
    for module, optimizer in pairs:
        train(module, optimizer)
    assert_same(pairs)


def test_the_own_step_function_sees_plain_tensors_of_the_steps_rows(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    collect = optim.Adam._init_group

    def noted(self: Any, group: Any, params: Any, grads: Any, *rest: Any) -> Any:
        result = collect(self, group, params, grads, *rest)
        seen.append([type(each) for each in (*params, *grads, *rest[0])])
        seen.append([each.shape[0] for each in (*params, *grads, *rest[0])])
        return result

    (_, (module, optimizer)) = pair(optim.Adam, device, lr=0.1)
    monkeypatch.setattr(optim.Adam, "_init_group", noted)
    train(module, optimizer)
    assert seen[-2:] == [[nn.Parameter, Tensor, Tensor], [3, 3, 3]]
    assert optimizer.param_groups[0]["params"][0] is module.weight
    assert list(optimizer.state) == [module.weight]
    assert optimizer.state[module.weight]["exp_avg"].shape == (ROWS, WIDTH)


@pytest.mark.parametrize("around", [False, True], ids=["within", "around"])
def test_groups_and_state_are_restored_after_an_exception(
    around: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the own step function, and in code around super().step()."""
    (_, (module, optimizer)) = pair(Projected, lr=0.1)
    train(module, optimizer)
    before = module.state_dict()["weight"].clone()
    module(torch.tensor([1])).sum().backward()

    def fails(*_: object) -> None:
        assert (optimizer.param_groups[0]["params"][0] is module.weight) == around
        raise ZeroDivisionError

    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(
            *((Projected, "base_step") if around else (optim.Adagrad, "_init_group")), fails
        )
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is module.weight
    assert list(optimizer.state) == [module.weight]
    assert optimizer.state[module.weight]["sum"].shape == (ROWS, WIDTH)
    assert_same_bytes(module.state_dict()["weight"], before)
    optimizer.step()
    assert not torch.equal(module.state_dict()["weight"], before)


@pytest.mark.parametrize("foreach", [None, True])
def test_gradients_of_a_model_are_clipped_by_functions_of_lists(
    device: str, foreach: bool | None
) -> None:
    """One gradient of another class would make torch clip each gradient by itself."""
    embedding = speedtorch.Embedding(ROWS, WIDTH, device=device)
    dense = [nn.Parameter(torch.ones(3, device=device)) for _ in range(20)]
    (embedding(torch.tensor([1, 2], device=device)).sum() + sum(p.sum() for p in dense)).backward()
    assert isinstance(embedding.weight.grad, SparseRows)
    with torch.profiler.profile() as profile:
        nn.utils.clip_grad_norm_([embedding.weight, *dense], 1.0, foreach=foreach)
    calls = {event.key: event.count for event in profile.key_averages()}
    # Each is recorded once for the gradients of all, and once for their memory.
    assert calls["aten::_foreach_norm"] == calls["aten::_foreach_mul_"] == 2
    single = calls.get("aten::mul_", 0) + calls.get("aten::linalg_vector_norm", 0)
    assert device == "cpu" or single < 5  # on a CPU these functions call those of one tensor


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[optim.Optimizer]:
    """The optimizers whose parameters were looked through."""
    looked, found = list[optim.Optimizer](), step_hooks.places_of_weights

    def counted(optimizer: optim.Optimizer) -> Any:
        looked.append(optimizer)
        return found(optimizer)

    monkeypatch.setattr(step_hooks, "places_of_weights", counted)
    return looked


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_step_calls_as_much_of_ours_beside_many_other_parameters(name: str) -> None:
    def calls(others: int) -> int:
        module = speedtorch.Embedding(ROWS, WIDTH)
        beside = [nn.Parameter(torch.ones(1)) for _ in range(others)]
        optimizer = getattr(optim, name)([*beside, *module.parameters()])
        speedtorch.attach(optimizer, module)
        for _ in range(2):
            module(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        module(torch.tensor([1, 2])).sum().backward()
        count = 0

        def note(frame: Any, event: str, _: object) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename in PACKAGE

        sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return count

    assert calls(3) == calls(300)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adamax], ids=lambda kind: kind.__name__)
def test_an_optimizer_without_weights_is_looked_through_once(
    kind: Any, looked: list[optim.Optimizer]
) -> None:
    speedtorch.Embedding(4, 2)
    plain = [nn.Parameter(torch.ones(2)) for _ in range(20)]
    optimizer = kind(plain, lr=0.1)
    for _ in range(5):
        for each in plain:
            each.grad = torch.ones(2)
        optimizer.step()
    assert len(looked) == 1
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()
    assert len(looked) == 2


def test_an_optimizer_and_a_copy_of_its_attributes_are_searched_once(
    looked: list[optim.Optimizer],
) -> None:
    embedding = speedtorch.Embedding.from_pretrained(torch.ones(4, 2), freeze=False)
    plain = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    optimizer = optim.SGD([embedding.weight, *plain], lr=0.5)
    embedding(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    tried = len(looked)
    copied = object.__new__(optim.SGD)
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = [{**optimizer.param_groups[0], "params": [embedding.weight]}]
    for each in (copied, optimizer) * 3:
        embedding.zero_grad()
        embedding(torch.tensor([1, 3])).sum().backward()
        each.step()
    assert looked[tried:] == [copied]  # and none to find out whether it keeps state of rows
    assert embedding.numpy()[:, 0].tolist() == [1, -2.5, 1, -2.5]


class WithAttributes(optim.Adam):
    """Pickles all of its attributes."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize("kind", [optim.Adam, WithAttributes])
@pytest.mark.parametrize(
    "copied",
    [
        partial(through_a_file, weights_only=False),
        copy.deepcopy,
        lambda each: pickle.loads(pickle.dumps(each)),
    ],
    ids=["saved", "copied", "pickled"],
)
def test_an_optimizer_that_was_stepped_is_copied_and_pickled_as_torchs(
    kind: type[optim.Adam], copied: Callable[[optim.Optimizer], optim.Optimizer]
) -> None:
    speedtorch.Embedding(4, 2)
    optimizer = kind([parameter := nn.Parameter(torch.ones(2))], lr=0.5)
    parameter.grad = torch.ones(2)
    optimizer.step()
    data = pickle.dumps(optimizer)
    assert b"speedtorch." not in data and vars(optimizer).pop("_speedtorch") is not None
    assert (pickle.dumps(optimizer) == data) == (kind is optim.Adam)
    optimizer.step()
    made = copied(optimizer)
    assert vars(made).get("_speedtorch") is None
    (own,) = made.param_groups[0]["params"]
    own.grad = torch.ones(2)
    made.step()
    optimizer.step()
    assert_same_bytes(own, parameter)
    assert vars(made)["_speedtorch"].weights == []


HOW_WEIGHTS_COME: dict[str, Callable[[optim.Optimizer, Tensor], object]] = {
    "a group": lambda optimizer, weight: optimizer.add_param_group({"params": [weight]}),
    "a longer list": lambda optimizer, weight: optimizer.param_groups[0]["params"].append(weight),
    "a new list": lambda optimizer, weight: optimizer.param_groups[0].update(params=[weight]),
}


@pytest.mark.parametrize("give", HOW_WEIGHTS_COME.values(), ids=HOW_WEIGHTS_COME)
def test_a_weight_that_an_optimizer_is_given_later_is_stepped(give: Any) -> None:
    embedding = speedtorch.Embedding.from_pretrained(torch.ones(4, 2), freeze=False)
    plain = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([plain], lr=0.5)
    for _ in range(2):
        plain.grad = torch.ones(2)
        optimizer.step()
    give(optimizer, embedding.weight)
    embedding(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    assert embedding.numpy()[:, 0].tolist() == [1, 0.5, 1, 0.5]


@pytest.mark.parametrize("foreach", [False, True])
def test_a_weight_that_replaces_a_parameter_unseen_is_refused_once(foreach: bool) -> None:
    embedding = speedtorch.Embedding.from_pretrained(torch.ones(4, 2), freeze=False)
    plain = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([plain], lr=0.5, foreach=foreach)
    plain.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups[0]["params"][0] = embedding.weight
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(RuntimeError, match="its weight replaced a parameter"):
        optimizer.step()
    assert embedding.weight.grad is not None  # outside of a step it can be read
    assert embedding.numpy().min() == 1
    optimizer.step()
    assert embedding.numpy()[:, 0].tolist() == [1, 0.5, 1, 0.5]


def test_a_weight_is_read_by_hooks_of_other_optimizers() -> None:
    embedding = speedtorch.Embedding(4, 2)
    plain, read = nn.Parameter(torch.ones(2)), list[Any]()
    optimizer = optim.SGD([plain], lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: read.append(embedding.weight.grad))
    for _ in range(2):
        embedding(torch.tensor([1, 3])).sum().backward()
        plain.grad = torch.ones(2)
        optimizer.step()
    assert [each.shape for each in read] == [(4, 2)] * 2


class OfEvenRows(Projected):
    """Has no step for the small parameter that shows which of the step functions call others."""

    def step(self, closure: Any = None) -> Any:
        if any(len(each) % 2 for group in self.param_groups for each in group["params"]):
            raise ValueError("rows are odd")
        return super().step(closure)


@NEEDS_GPU
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_the_first_optimizer_of_a_class_may_support_only_gpus(lr: Any) -> None:
    class First(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    rate = lr.cuda() if isinstance(lr, Tensor) else lr
    embedding = speedtorch.Embedding(20, 4, device="cuda")
    first = First(embedding.parameters(), lr=rate, capturable=True)
    speedtorch.attach(first, embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    first.step()


class Noisy(optim.Adam):
    """Calls super().step(), and draws noise."""

    def step(self, closure: Any = None) -> Any:
        torch.rand(3)
        return super().step(closure)


def test_a_trial_of_step_functions_draws_no_random_numbers() -> None:
    embedding = speedtorch.Embedding(20, 4)
    noisy = Noisy(embedding.parameters())
    torch.manual_seed(5)
    speedtorch.attach(noisy, embedding)
    first = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))


def test_step_functions_that_cannot_be_distinguished_raise() -> None:
    emb = speedtorch.Embedding(20, 4)
    optimizer = OfEvenRows(emb.parameters(), lr=0.1)
    before = emb.state_dict()["weight"].clone()
    emb(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(NotImplementedError, match=r"a trial of its step\(\) .* \(rows are odd\)"):
        optimizer.step()
    assert torch.equal(emb.state_dict()["weight"], before)


def test_a_step_that_raises_keeps_neither_optimizer_nor_rows() -> None:
    embedding = speedtorch.Embedding(4, 2)
    adam = optim.Adam(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="attach"):
        adam.step()
    gone = weakref.ref(adam), weakref.ref(embedding.trained_rows)
    del adam, embedding
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_step_waits_for_that_of_another_thread_and_finds_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other thread has the places of the weights when this one looks for them."""
    embedding = speedtorch.Embedding.from_pretrained(torch.ones(4, 2), freeze=False)
    sgd = optim.SGD(embedding.parameters(), lr=0.25)
    embedding(torch.tensor([0])).sum().backward()
    sgd.step()  # the first one tries the optimizer out
    sgd.zero_grad()
    within, goes_on = threading.Event(), threading.Event()
    module, calls = importlib.import_module("torch.optim.sgd"), list[int]()
    plain_sgd = module.sgd

    def slow_sgd(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            within.set()
            assert goes_on.wait(30)
        plain_sgd(*args, **kwargs)

    monkeypatch.setattr(module, "sgd", slow_sgd)
    embedding(torch.tensor([1])).sum().backward()
    thread = threading.Thread(target=sgd.step)
    thread.start()
    assert within.wait(30)
    threading.Timer(0.3, goes_on.set).start()
    sgd.step()
    thread.join()
    assert embedding.numpy()[:, 0].tolist() == [0.75, 0.5, 1, 1]  # both have stepped
    embedding(torch.tensor([3])).sum().backward()
    sgd.step()
    assert embedding.numpy()[:, 0].tolist() == [0.75, 0.5, 1, 0.75]


def test_a_step_after_an_interrupt_of_the_search_for_weights_is_whole() -> None:
    def begun() -> tuple[Any, Any, optim.Optimizer]:
        first, second = (speedtorch.Embedding(4, 2, _weight=torch.ones(4, 2)) for _ in range(2))
        sgd = optim.SGD(first.parameters(), lr=0.25)
        sgd.step()
        sgd.add_param_group({"params": second.parameters()})
        (first(torch.tensor([1])).sum() + second(torch.tensor([2])).sum()).backward()
        return first, second, sgd

    count = 0
    for (first, second, sgd), _ in every_interrupt(
        begun, lambda made: step_hooks._before_step(made[2], (), {}), files=STEP_HOOKS
    ):
        sgd.step()
        assert first.numpy()[:, 0].tolist() == [1, 0.75, 1, 1]
        assert second.numpy()[:, 0].tolist() == [1, 1, 0.75, 1]
        count += 1
    assert count > 20


def test_an_interrupt_at_any_line_of_a_step_keeps_neither_optimizer_nor_rows() -> None:
    def begun() -> optim.Optimizer:
        embedding = speedtorch.Embedding(4, 2)
        sgd = optim.SGD(embedding.parameters())
        made.append((weakref.ref(sgd), weakref.ref(embedding.trained_rows)))
        for _ in range(2):  # the first step tries the optimizer out
            sgd.step()
            embedding(torch.tensor([1])).sum().backward()
        return sgd

    made: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []
    interrupts = every_interrupt(begun, lambda sgd: sgd.step(), files=STEP_HOOKS)
    assert sum(1 for _ in interrupts) > 50
    gc.collect()
    assert not [line for line, gone in enumerate(made, 1) if any(each() for each in gone)]


def test_an_optimizer_with_equal_settings_is_not_probed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = pair(optim.SGD, lr=0.1, weight_decay=0.25)
    probes, probe = list[float](), step_hooks.probe_optimizer

    def counted(optimizer: Any, *arguments: Any) -> Any:
        probes.append(optimizer.param_groups[0]["weight_decay"])
        return probe(optimizer, *arguments)

    monkeypatch.setattr(step_hooks, "probe_optimizer", counted)
    for decay in ("0.25", "0.25", "0.0", "0.0"):  # another float object each time
        for module, optimizer in made:
            optimizer.param_groups[0]["weight_decay"] = float(decay)
            module(torch.arange(ROWS)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert probes == [0.25, 0.0]
    assert_same(made)
