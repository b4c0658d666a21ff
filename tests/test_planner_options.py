"""E1: the tree of strategies is the paper's, and every strategy ends with the dense sum on every worker."""

from collections import Counter

import pytest

from grace.communicators.planned.strategy import Action, Option, check, options, parse, states


def test_counts_are_the_papers():
    every = options()
    assert len(every) == len(set(every)) == 4341
    assert len(options(devices=("gpu",))) == 174
    assert (len(options(flat_only=True)), len([o for o in every if not o.flat])) == (63, 4278)
    assert (len(options(True, ("gpu",))), sum(not o.flat for o in options(devices=("gpu",)))) == (12, 162)
    assert Counter(o.compressions for o in every) == {0: 9, 1: 236, 2: 1152, 3: 1920, 4: 1024}
    assert len(options(max_compressions=1)) == 9 + 236
    assert str(every[0]) == "allreduce(flat)"
    assert max(len(o.actions) for o in every) == 12


def sequences(summable=False):
    """An independent definition of the tree: every sequence of useful actions that sums everything exactly once.

    A level's sum is "own" (not begun), "shard", "root" or "full"; gradients go intra, inter, intra. Excluded are a
    compression that is undone at once or ends the sequence, and collectives for payloads without payloads.
    ``summable``: payloads may also be summed, directly after compression.
    """
    begin = {"reduce_scatter": "shard", "reduce": "root", "allreduce": "full"}
    begin_star = {"alltoall": "shard", "gather": "root", "allgather": "full"}
    end = {"allgather": "shard", "broadcast": "root"}

    def go(path, compressed, sums):
        flat, intra, inter = sums
        done = flat == "full" or (intra == inter == "full")
        if done:
            if not compressed:
                yield tuple(path)
            elif path[-1].kind != "compress":
                for device in ("gpu", "cpu"):
                    yield (*path, Action("decompress", device=device))
            return
        if not (path and path[-1].kind == "compress"):
            for device in ("gpu", "cpu"):
                kind = "decompress" if compressed else "compress"
                yield from go([*path, Action(kind, device=device)], not compressed, sums)
        for number, level in enumerate(("flat", "intra", "inter")):
            place = sums[number]
            if place == "full" or (level == "flat" and intra != "own") or (level != "flat" and flat != "own"):
                continue
            if level == "inter" and intra == "own":
                continue
            if level == "intra" and place != "own" and inter != "full":
                continue
            moves = dict((begin_star if compressed else begin) if place == "own" else {})
            moves |= {kind: "full" for kind, needs in end.items() if needs == place}
            if summable and place == "own" and compressed and path[-1].kind == "compress":
                moves["allreduce"] = "full"
            for kind, to in moves.items():
                if level == "intra" and place == "own" and to == "full":
                    continue  # then all workers of a machine would repeat the same work between machines
                after = list(sums)
                after[number] = to
                yield from go([*path, Action(kind, level, compressed)], compressed, tuple(after))

    return go([], False, ("own", "own", "own"))


@pytest.mark.parametrize("summable", [False, True])
def test_the_grammar_is_all_that_makes_sense(summable):
    assert {Option(path) for path in sequences(summable)} == set(options(summable=summable))


def test_what_may_be_summed_adds_strategies_only():
    more = options(devices=("gpu",), summable=True)
    assert len(more) == len(set(more)) == 174 + 13
    added = set(more) - set(options(devices=("gpu",)))
    assert all("compress(gpu) allreduce*(" in str(option) for option in added)
    assert parse("compress(gpu) allreduce*(flat) decompress(gpu)") in added


def test_every_strategy_is_sound_and_its_text_is_itself():
    for option in options(summable=True):
        check(option)
        assert parse(str(option)) == option
        held = states(option)
        assert len(held) == len(option.actions) + 1
        assert {held[0].compressed, held[-1].compressed} == {False}
        assert option.on(option.devices) == option
        assert option.on(["cpu"] * len(option.devices)) in set(options(devices=("cpu",), summable=True))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "allreduce",
        "allreduce(moon)",
        "allreduce*(flat)",
        "allgather(flat)",
        "compress(gpu)",
        "compress(gpu) decompress(gpu) allreduce(flat)",
        "compress(flat) allgather*(flat) decompress(gpu)",
        "compress(gpu) allgather(flat) decompress(gpu)",
        "compress(gpu) allgather*(flat)",
        "reduce_scatter(flat)",
        "reduce_scatter(flat) broadcast(flat)",
        "reduce(flat) allgather(flat)",
        "allreduce(flat) allreduce(flat)",
        "allreduce(intra) allreduce(inter)",
        "reduce_scatter(intra) allgather(intra)",
        "reduce_scatter(intra) allreduce(inter)",
        "allreduce(inter)",
        "reduce_scatter(intra) allreduce(flat) allgather(intra)",
        "compress(gpu) alltoall*(flat) allgather(flat) decompress(gpu)",
        "compress(gpu) alltoall*(intra) allreduce*(inter) allgather*(intra) decompress(gpu)",
        "compress(gpu) allreduce(flat) decompress(gpu)",
    ],
)
def test_what_is_no_strategy_is_refused(text):
    with pytest.raises(ValueError, match=r"strategy|action|needs|end|decompresses"):
        parse(text)


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="choose from gpu, cpu"):
        options(devices=("tpu",))
    with pytest.raises(ValueError, match="is a text such as"):
        parse(7)
