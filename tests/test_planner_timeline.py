"""E3: the end of a step, compared with timelines worked out by hand and with a second simulator."""

import itertools
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.kernels.timeline import NativePlayer
from grace.planner.timeline import CPU, DEVICE, INTER, INTRA, Timeline, overheads, save_trace

D, C, A, E = DEVICE, CPU, INTRA, INTER


def oracle(backward, chains, servers=1, deferred=False):
    """A second, event-driven simulator: free servers take the job that has waited longest."""
    jobs = [[(D, b), *chain] for b, chain in zip(backward, chains, strict=True)]
    free = {D: [0.0], C: [0.0] * servers, A: [0.0], E: [0.0]}
    ready = [(0.0, 1, 0, 0)] if jobs else []  # (time, 0 chain or 1 backward or 2 deferred, tensor, number)
    ended, parked, done = 0.0, [], None
    while ready:
        moment, order, tensor, number = found = min(ready)
        ready.remove(found)
        resource, seconds = jobs[tensor][number]
        server = free[resource].index(min(free[resource]))
        end = free[resource][server] = max(moment, free[resource][server]) + seconds
        ended = max(ended, end)
        if order == 1 and tensor + 1 < len(jobs):
            ready.append((end, 1, tensor + 1, 0))
        elif order == 1:
            done = end  # deferred work starts after the last gradient's hook
            ready += [(at, *rest) if at > done else (done, 2, *rest[1:]) for at, *rest in parked]
        if number + 1 < len(jobs[tensor]):
            after = (end, 0, tensor, number + 1)
            if deferred and resource in (A, E) and done is None:
                parked.append(after)
            else:
                ready.append((done, 2, *after[2:]) if deferred and resource in (A, E) and end <= done else after)
    return ended


HAND = [
    # One tensor: its gradient, then its message.
    ([3.0], [((E, 5.0),)], 8.0),
    # The second message waits for the first: 2 + 4 + 4. The backward pass of 4 is hidden.
    ([2.0, 2.0], [((E, 4.0),), ((E, 4.0),)], 10.0),
    # The link idles between 3 and 12: only the last message counts.
    ([2.0, 10.0], [((E, 1.0),), ((E, 4.0),)], 16.0),
    # Compression of the first delays the second gradient (2 + 1 + 2 = 5); its message ends at 6, the second's at 8.
    ([2.0, 2.0], [((D, 1.0), (E, 3.0), (D, 1.0)), ((E, 2.0),)], 8.0),
    # On the CPU it delays no gradient: they come at 2 and 4. The second message takes 4-6, the first 6-9; ends at 10.
    ([2.0, 2.0], [((C, 3.0), (E, 3.0), (C, 1.0)), ((E, 2.0),)], 10.0),
    # Two levels, pipelined: within machines 2-4, 4-6; between machines 4-9, 9-14; within machines again 9-10, 14-15.
    ([2.0, 0.0], [((A, 2.0), (E, 5.0), (A, 1.0)), ((A, 2.0), (E, 5.0), (A, 1.0))], 15.0),
]


@pytest.mark.parametrize("backward, chains, ends", HAND)
def test_timelines_worked_out_by_hand(backward, chains, ends, player):
    assert Timeline(backward, chains).seconds == ends
    assert oracle(backward, chains) == ends


def test_a_deferred_chain_waits_for_the_backward_pass(player):
    chains = [((E, 1.0), (D, 2.0)), (), ((E, 1.0),)]
    assert Timeline([2.0, 2.0, 6.0], chains).seconds == 13.0  # decoding, 4 to 6, delays the last gradient to 12
    assert Timeline([2.0, 2.0, 6.0], chains, deferred=True).seconds == 12.0  # the last gradient comes at 10


def test_a_pool_takes_as_many_as_it_has_threads(player):
    chains = [((C, 4.0),)] * 3
    assert [Timeline([0.0] * 3, chains, servers).seconds for servers in (1, 2, 3)] == [12.0, 8.0, 4.0]


@pytest.fixture(params=["python", "native"])
def player(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setenv("GRACE_KERNELS", "off")
    else:
        monkeypatch.delenv("GRACE_KERNELS", raising=False)
        if not isinstance(Timeline([], [])._player, NativePlayer):
            pytest.skip("the kernels are not built: python -m grace.kernels.build")


def instance(seed, links=(A, E), whole=True):
    draw = random.Random(seed)

    def seconds():
        return float(draw.randrange(0, 12)) if whole else draw.random()

    def chain():
        kinds = [(link,) for link in links] + [(D, link, D) for link in links] + [(C, link, C) for link in links]
        if len(links) == 2:
            kinds += [(A, E, A), (A, D, E, D, A), (C, E, D)]
        return tuple((resource, seconds()) for resource in draw.choice(kinds))

    count = draw.randrange(1, 24)
    return [seconds() for _ in range(count)], [chain() for _ in range(count)], draw.randrange(1, 4), draw.random() < 0.3


@pytest.mark.parametrize("whole", [True, False])
def test_equal_to_the_second_simulator(whole, player):
    for seed in range(150):
        backward, chains, servers, deferred = instance(seed, whole=whole)
        assert Timeline(backward, chains, servers, deferred).seconds == oracle(backward, chains, servers, deferred)


def test_changes_are_as_if_made_from_the_beginning(player):
    for seed in range(60):
        backward, chains, servers, deferred = instance(seed, whole=False)
        _, others, *_ = instance(seed + 1000, whole=False)
        draw = random.Random(seed)
        line = Timeline(backward, chains, servers, deferred)
        for _ in range(8):
            places = draw.sample(range(len(chains)), draw.randrange(1, min(4, len(chains) + 1)))
            changes = {place: draw.choice(others) for place in places}
            changed = [changes.get(place, chain) for place, chain in enumerate(chains)]
            expected = oracle(backward, changed, servers, deferred)
            assert line.tried(changes) == expected
            assert line.tried(changes, expected * (1 + 1e-9)) == expected
            assert line.tried(changes, expected * (1 - 1e-9)) == float("inf")
            if draw.random() < 0.5:
                assert line.set(changes) == expected
                chains = changed
            assert line.chains == tuple(chains)


def test_both_players_give_the_same_bits(monkeypatch):
    monkeypatch.delenv("GRACE_KERNELS", raising=False)
    if not isinstance(Timeline([], [])._player, NativePlayer):
        pytest.skip("the kernels are not built: python -m grace.kernels.build")
    for seed in range(100):
        backward, chains, servers, deferred = instance(seed, whole=False)
        found = []
        for kernels in ("off", "on"):
            monkeypatch.setenv("GRACE_KERNELS", kernels)
            line = Timeline(backward, chains, servers, deferred)
            hidden = bytearray(len(chains))
            line.hide(hidden)
            tries = [line.tried({place: chains[-1]}, line.seconds) for place in range(len(chains))]
            found.append((line.seconds, bytes(hidden), tries, line.set({0: chains[-1]})))
        assert found[0] == found[1]


def test_never_shorter_than_the_backward_pass_or_the_busiest_link():
    for seed in range(200):
        backward, chains, servers, deferred = instance(seed, whole=False)
        line = Timeline(backward, chains, servers, deferred)
        busy = [sum(s for chain in chains for r, s in chain if r == resource) for resource in (A, E)]
        assert line.seconds >= max(sum(backward), *busy) * (1 - 1e-12)
        parts = overheads(line.spans())
        assert parts.backward == pytest.approx(sum(backward))
        assert parts.backward + parts.communication + parts.compression == pytest.approx(line.seconds)


def messages(seed):
    backward, chains, *_ = instance(seed, links=(E,), whole=True)
    return backward, [tuple(op for op in chain if op[0] == E) for chain in chains]


def test_one_link_later_messages_never_help():
    for seed in range(100):
        backward, chains = messages(seed)
        line = Timeline(backward, chains)
        for place, chain in enumerate(chains):
            slower = tuple((resource, seconds + 1) for resource, seconds in chain)
            assert line.tried({place: slower}) >= line.seconds


def test_one_link_what_comes_before_a_gap_gains_nothing(player):
    # Espresso's first property: compressing a message before an idle gap does not shorten the step.
    seen = 0
    for seed in range(200):
        backward, chains = messages(seed)
        line = Timeline(backward, chains)
        hidden = bytearray(len(chains))
        line.hide(hidden)
        for place in itertools.compress(range(len(chains)), hidden):
            seen += 1
            for encode in (0.0, 1.0):
                assert line.tried({place: ((D, encode), (E, 0.0), (D, encode))}) >= line.seconds
    assert seen > 100


def test_two_links_anomalies_are_few():
    # With two links, a slower message may shorten a list schedule. The test limits how often.
    odd = tried = 0
    for seed in range(150):
        backward, chains, servers, _ = instance(seed)
        line = Timeline(backward, chains, servers)
        for place, chain in enumerate(chains):
            slower = tuple((r, s + (r in (A, E))) for r, s in chain)
            tried += 1
            odd += line.tried({place: slower}) < line.seconds
    assert tried > 1000
    assert odd / tried < 0.03, f"{odd} of {tried}"


@given(st.integers(0, 10**6))
def test_the_same_again(seed):
    backward, chains, servers, deferred = instance(seed, whole=False)
    lines = [Timeline(backward, chains, servers, deferred) for _ in range(2)]
    assert lines[0].seconds == lines[1].seconds
    assert lines[0].spans() == lines[1].spans()


def test_spans_are_chains_in_order_and_never_two_at_once(tmp_path):
    backward, chains, *_ = instance(3, whole=False)
    line = Timeline(backward, chains)
    spans = line.spans()
    assert max(span.ended for span in spans) == line.seconds
    for tensor, chain in enumerate(chains):
        mine = [span for span in spans if span.tensor == tensor]
        assert [(s.resource, s.operation) for s in mine] == [(D, -1), *((r, i) for i, (r, _) in enumerate(chain))]
        assert all(one.ended <= two.began for one, two in itertools.pairwise(mine))
    for resource in (D, C, A, E):
        there = [span for span in spans if span.resource == resource]
        assert all(one.ended <= two.began for one, two in itertools.pairwise(there))
    save_trace(tmp_path / "trace.json", spans, [f"t{i}" for i in range(len(chains))], [["op"] * 9] * len(chains))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(spans)


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="one for each tensor"):
        Timeline([1.0], [])
    with pytest.raises(ValueError, match="at least one thread"):
        Timeline([1.0], [()], servers=0)
