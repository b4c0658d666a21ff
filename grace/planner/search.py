"""Searches for the strategies, one per tensor, that minimise a step's time.

Three modes. "paper": one pass over the tensors, large ones first, then some compressions move to the CPU (Espresso,
section 4.4, algorithms 1 and 2). "refined": passes until nothing changes, from several starting points, swaps of two
tensors' strategies, and passes after random changes of a few strategies. "exact": all combinations, for few tensors.
docs/planner-model.md shows how far the first two are from the optimum.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from grace.planner.costs import Costs
from grace.planner.profile import Profile
from grace.planner.timeline import Chain, Timeline

Mode = Literal["paper", "refined", "exact"]
MODES: tuple[Mode, ...] = get_args(Mode)
GAIN = 1e-9
"""Minimum relative gain for changing a strategy, so that rounding decides nothing."""
PLACEMENTS = 4096
"""Maximum number of CPU placements that are all tried; beyond it, groups move one after the other."""
WORK = 4_000_000
"""Budget of the refined mode: the number of timelines times the number of tensors. So models with hundreds of tensors
get fewer passes."""
SHAKES, SHAKEN = 24, 3
"""Number of random perturbations in the refined mode, and number of strategies that each of them changes."""
EXACT = 10**6
"""Maximum number of combinations in the exact mode."""


class Choice(NamedTuple):
    """A strategy for a tensor, and its chain."""

    option: Any
    chain: Chain
    compressed: bool = True


def _alone(tensor: int, choice: Choice) -> Choice | None:
    return None


@dataclass(frozen=True)
class Problem:
    """Tensors in the order of their gradients, and the candidates for each."""

    backward: Sequence[float]
    sizes: Sequence[int]
    candidates: Sequence[Sequence[Choice]]
    """For each tensor, its candidates, of which the first ``plain`` are uncompressed; or the only allowed one."""
    plain: int = 1
    wider: Callable[[], Sequence[Sequence[Choice]]] | None = None
    """Returns the candidates of the modes "refined" and "exact", uncompressed ones first; None: ``candidates``."""
    offloaded: Callable[[int, Choice], Choice | None] = _alone
    """A tensor's choice with its compressions moved to the CPU; None if impossible."""
    servers: int = 1
    deferred: bool = False

    @classmethod
    def of(cls, profile: Profile, costs: Costs, servers: int = 1, deferred: bool = False) -> Problem:
        """The problem for a model, with the strategies worth considering for each tensor."""
        sizes = [tensor.size for tensor in profile.tensors]

        def found(offload: bool) -> list[list[Choice]]:
            known = {
                size: [Choice(o, chain, o.compressions > 0) for o, chain in costs.candidates(size, offload)]
                for size in set(sizes)
            }
            candidates = [known[size] for size in sizes]
            for number, chain in costs.last(sizes).items():
                candidates[number] = [Choice(costs.dense[0], chain, False)]
            return candidates

        def offloaded(tensor: int, choice: Choice) -> Choice:
            option = choice.option.on(["cpu"] * len(choice.option.devices))
            return Choice(option, costs.chain(option, sizes[tensor]))

        return cls(
            [tensor.backward for tensor in profile.tensors],
            sizes,
            found(False),
            len(costs.dense),
            lambda: found(True),
            offloaded if "cpu" in costs.devices[1:] else _alone,
            servers,
            deferred,
        )

    @cached_property
    def wide(self) -> Sequence[Sequence[Choice]]:
        """The candidates of the modes "refined" and "exact"."""
        return self.wider() if self.wider else self.candidates

    def timeline(self, choices: Sequence[Choice] | None = None) -> Timeline:
        """The timeline of these choices; default: plain allreduce everywhere."""
        chains = [choice.chain for choice in choices or [each[0] for each in self.candidates]]
        return Timeline(self.backward, chains, self.servers, self.deferred)

    def order(self) -> list[int]:
        """Tensor indices, by descending size, then by descending index."""
        return sorted(range(len(self.sizes)), key=lambda tensor: (-self.sizes[tensor], -tensor))


@dataclass(frozen=True)
class Selection:
    """A search result."""

    choices: tuple[Choice, ...]
    seconds: float
    """Seconds from the start of the backward pass to the end of the last operation."""
    simulations: int
    """Number of simulated timelines, including aborted ones."""


def select(problem: Problem, mode: Mode = "refined") -> Selection:
    """Strategies for all tensors. Deterministic: every worker gets the same answer to the same problem.

    ValueError for an unknown mode, and for "exact" with more than `EXACT` combinations.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}: choose from {', '.join(MODES)}")
    if not problem.sizes:
        return Selection((), 0.0, 0)
    return {"paper": paper, "refined": refined, "exact": exhaustive}[mode](problem)


class _State:
    # The current choices and their timeline, kept in sync.
    def __init__(self, problem: Problem):
        self.problem = problem
        self.choices = [each[0] for each in problem.candidates]
        self.line = problem.timeline(self.choices)

    def change(self, changes: Mapping[int, Choice]) -> None:
        for tensor, choice in changes.items():
            self.choices[tensor] = choice
        self.line.set({tensor: choice.chain for tensor, choice in changes.items()})

    def reset(self, choices: Iterable[Choice]) -> None:
        self.choices = list(choices)
        self.line.set({tensor: choice.chain for tensor, choice in enumerate(self.choices)})

    def improve(self, alternatives: Iterable[Mapping[int, Choice]]) -> bool:
        # Apply the best of these changes if it beats the current state.
        best, found = self.line.seconds * (1 - GAIN), None
        for changes in alternatives:
            seconds = self.line.tried({tensor: choice.chain for tensor, choice in changes.items()}, best)
            if seconds < best:
                best, found = seconds, changes
        if found is not None:
            self.change(found)
        return found is not None

    def selection(self) -> Selection:
        return Selection(tuple(self.choices), self.line.seconds, self.line.simulations)


# -- the paper's algorithms ------------------------------------------------------------------------------------------
def paper(problem: Problem) -> Selection:
    """Algorithm 1, then, if there is a CPU pool, algorithm 2."""
    state = _State(problem)
    _one_pass(state)
    _offload(state)
    return state.selection()


def _one_pass(state: _State) -> None:
    problem = state.problem
    removed = bytearray(len(problem.sizes))
    state.line.hide(removed)
    for tensor in problem.order():
        if removed[tensor]:
            continue  # an idle gap follows its messages, so nothing later waits for them
        if state.improve(
            {tensor: choice} for choice in problem.candidates[tensor] if choice is not state.choices[tensor]
        ):
            state.line.hide(removed)


def _offload(state: _State) -> None:
    # Among equal tensors with equal strategies, those with the earliest gradients move to the CPU (the paper's lemma).
    groups: dict[tuple[int, Any], list[tuple[int, Choice]]] = {}
    for tensor, choice in enumerate(state.choices):
        moved = state.problem.offloaded(tensor, choice) if choice.compressed else None
        if moved is not None:
            groups.setdefault((state.problem.sizes[tensor], choice.option), []).append((tensor, moved))
    members = list(groups.values())
    if math.prod(len(group) + 1 for group in members) <= PLACEMENTS:
        counts = itertools.product(*(range(len(group) + 1) for group in members))
        state.improve(
            {tensor: moved for group, count in zip(members, each, strict=True) for tensor, moved in group[:count]}
            for each in counts
            if any(each)
        )
        return
    for group in members:
        for tensor, moved in group:
            if not state.improve([{tensor: moved}]):
                break


# -- the refined mode ------------------------------------------------------------------------------------------------
def refined(problem: Problem) -> Selection:
    """Passes to a fixed point from several starting points, swaps and perturbations; then drops useless compression.

    The starting points: the result of the paper's algorithms, plain allreduces, each tensor's shortest chain, and on
    several levels plain allreduces of two levels.
    """
    state = _State(problem)
    _one_pass(state)
    _offload(state)
    candidates = problem.wide
    plain = [[each[min(number, len(each) - 1)] for each in candidates] for number in range(problem.plain)]
    solo = [min(each, key=lambda choice: sum(seconds for _, seconds in choice.chain)) for each in candidates]
    best, found = math.inf, state.choices
    starts = (state.choices, plain[0], solo, *plain[1:])
    limit = WORK // len(candidates)
    for number, start in enumerate(starts, 1):
        state.reset(start)
        _passes(state, candidates, limit * number // (len(starts) + 1))
        if state.line.seconds < best * (1 - GAIN):
            best, found = state.line.seconds, list(state.choices)
    state.reset(found)
    _settle(state, candidates, limit)
    draw = random.Random(0)  # the same numbers on every worker
    for _ in range(SHAKES if len(state.choices) > 1 else 0):
        kept, seconds = list(state.choices), state.line.seconds
        shaken = draw.sample(range(len(kept)), min(SHAKEN, len(kept)))
        state.change({tensor: draw.choice(candidates[tensor]) for tensor in shaken})
        _passes(state, candidates, limit)
        _settle(state, candidates, limit)
        if state.line.seconds >= seconds * (1 - GAIN):
            state.reset(kept)
        if state.line.simulations >= limit:
            break
    _plainer(state, candidates)
    return state.selection()


def _passes(state: _State, candidates: Sequence[Sequence[Choice]], limit: int) -> None:
    order = state.problem.order()
    last = order[-1]
    while state.line.simulations < limit:
        for tensor in order:
            if state.improve({tensor: choice} for choice in candidates[tensor] if choice is not state.choices[tensor]):
                last = tensor
            elif tensor == last:
                return  # one round without a change


def _settle(state: _State, candidates: Sequence[Sequence[Choice]], limit: int) -> None:
    while _swaps(state, limit):
        _passes(state, candidates, limit)


def _swaps(state: _State, limit: int) -> bool:
    # Let two tensors of one size swap their strategies.
    better = False
    for changes in _exchanges(state):
        if state.line.simulations >= limit:
            return False
        better = state.improve([changes]) or better
    return better


def _exchanges(state: _State) -> Iterator[dict[int, Choice]]:
    sizes, choices = state.problem.sizes, state.choices
    groups: dict[int, list[int]] = {}
    for tensor, size in enumerate(sizes):
        if len(state.problem.candidates[tensor]) > 1:  # small tensors have no choice
            groups.setdefault(size, []).append(tensor)
    for group in groups.values():
        for one, two in itertools.combinations(group, 2):
            if choices[one] is not choices[two]:
                yield {one: choices[two], two: choices[one]}


def _plainer(state: _State, candidates: Sequence[Sequence[Choice]]) -> None:
    for tensor, choice in enumerate(state.choices):
        limit = state.line.seconds * (1 + GAIN)
        if choice.compressed and state.line.tried({tensor: candidates[tensor][0].chain}, limit) < limit:
            state.change({tensor: candidates[tensor][0]})


# -- the exact mode ----------------------------------------------------------------------------------------------------
def exhaustive(problem: Problem) -> Selection:
    """The best of all combinations, for few tensors."""
    candidates = problem.wide
    count = math.prod(map(len, candidates))
    if count > EXACT:
        raise ValueError(f"{count:.1e} combinations are too many to try: use mode 'refined' or 'paper'")
    state = _State(problem)
    *earlier, last = range(len(candidates))
    best, found = math.inf, list(state.choices)
    for combination in itertools.product(*(candidates[tensor] for tensor in earlier)):
        changes = {t: choice for t, choice in enumerate(combination) if choice is not state.choices[t]}
        if changes:
            state.change(changes)
        for choice in candidates[last]:
            seconds = state.line.tried({last: choice.chain}, best)
            if seconds < best:
                best, found = seconds, [*combination, choice]
    state.reset(found)
    return state.selection()
