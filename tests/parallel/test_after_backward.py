"""A private name of torch's: what we count on when we use it."""

from __future__ import annotations

import threading

import torch

from echelon.parallel.gradients.unreduced_params import after_backward


def test_it_runs_once_when_all_gradients_are_there_in_the_callers_thread() -> None:
    first, last = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    said: list[tuple[bool, bool, bool]] = []

    def ended() -> None:
        said.append((first.grad is not None, last.grad is not None, threading.current_thread() is threading.main_thread()))

    # `last` is used last, so that its gradient comes first.
    last.register_post_accumulate_grad_hook(lambda _: after_backward(ended))
    for times in (1, 2):
        ((first * 2).exp() * last).sum().backward()
        assert said == [(True, True, True)] * times
