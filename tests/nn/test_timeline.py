"""What a step does has names in a timeline of torch.profiler."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import speedtorch


def test_a_timeline_names_what_a_step_does(device: str) -> None:
    embedding = speedtorch.Embedding(100, 4, device=device)
    adam = torch.optim.Adam(embedding.parameters())
    speedtorch.attach(adam, embedding)

    def step() -> None:
        adam.zero_grad()
        embedding(torch.arange(8, device=device)).sum().backward()
        adam.step()

    step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    spans = {event.name.partition("::")[2]: event.time_range for event in profiled.events()}
    inside = {"lookup": ["load_batch"], "before_step": [], "after_step": [], "sum_rows": []}
    for outer, inner in inside.items():
        for each in inner:
            assert spans[outer].start <= spans[each].start <= spans[each].end <= spans[outer].end
        assert spans[outer].elapsed_us() >= 0
