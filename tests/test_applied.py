"""Which exchanges count: every cell of the state table, and the bookkeeping of the rule alone."""

import pytest
from launch import launch

from grace.engine.applied import NOT_STEPPED, Rule, Windows

LEAST = {("optimizer",): 95, ("ddp",): 85, ("fsdp",): 60, ("optimizer", "flags"): 90, ("ddp", "flags"): 80}
"""Fewest cells that each integration has, so that none is lost unseen."""


@pytest.mark.processes
@pytest.mark.parametrize("kind", LEAST, ids=" ".join)
def test_every_cell_of_the_table_is_as_its_oracle(kind, tmp_path):
    found = launch("torchrun", 2, "applied_torch.py", tmp_path, *kind)
    assert len(found[0]) >= LEAST[kind]
    assert found[0].keys() == found[1].keys()
    wrong = {f"{name}, worker {rank}": text for rank, cells in enumerate(found) for name, text in cells.items() if text}
    assert wrong == {}


class Decides:
    """A stand-in for a Grace: its undecided tensors, and a list of the decisions."""

    def __init__(self, *names):
        self.undecided, self.said = set(names), []

    def decide(self, applied=(), discarded=(), when=None):
        applied, discarded = set(applied) & self.undecided, (set(discarded) - set(applied)) & self.undecided
        self.undecided -= applied | discarded
        self.said.append((applied, discarded))


def test_an_optimizers_step_says_nothing_of_anothers_tensors():
    grace = Decides("a", "b", "c")
    Rule(grace).stepped({"a", "b"}, {"a"}, True)
    assert grace.said == [({"a"}, {"b"})]
    assert grace.undecided == {"c"}


def test_a_step_that_changed_nothing_decides_nothing_but_owns():
    grace = Decides("a")
    rule = Rule(grace)
    rule.stepped({"a"}, {"a"}, False)
    assert grace.undecided == {"a"}
    assert rule.unowned == set()


def test_written_weights_count_until_an_optimizer_has_stepped():
    grace = Decides("a", "b")
    rule = Rule(grace)
    rule.owned = {"b"}
    with pytest.warns(UserWarning, match=r"grc.discard\(\)"):
        rule.passed({"a", "b"}, {"a", "b"})
    assert grace.said == [({"a"}, {"b"})]


def test_other_optimizers_count_only_for_tensors_that_nobody_holds():
    for loose, applied in ((set(), set()), ({"a"}, {"a"})):
        grace = Decides("a")
        rule = Rule(grace)
        rule.others = True
        if applied:
            with pytest.warns(UserWarning, match="an optimizer stepped that may hold copies"):
                rule.passed({"a"}, set(), loose)
        else:
            rule.passed({"a"}, set(), loose)
        assert grace.said == [(applied, {"a"} - applied)]


def test_three_updates_by_hand_although_an_optimizer_holds_the_weights_are_said(recwarn):
    grace = Decides()
    rule = Rule(grace)
    rule.owned = {"a"}
    for count in range(1, 5):
        grace.undecided = {"a"}
        rule.passed({"a"}, {"a"})
        assert len(recwarn) == (count >= 3)
    assert str(recwarn[0].message) == NOT_STEPPED.format("a")


def test_a_window_is_a_step_at_its_first_applied_tensor_and_discarded_if_none_is():
    windows = Windows()
    windows.add(["a", "b"])
    assert windows.close(["a"], True) == 1
    windows.add(["c"])  # a new window, as the previous exchange was counted
    assert windows.close(["b"], False) == 0
    assert windows.close(["c"], False) == 1
    windows.add(["a"])
    windows.add(["b"])  # undecided exchanges share the decision
    assert windows.close(["a"], False) == 0
    assert windows.close(["b"], True) == 1
    assert not windows


def test_a_tensor_that_is_exchanged_again_moves_to_the_latest_window():
    windows = Windows()
    windows.add(["a", "b"])
    windows.close(["a"], True)
    windows.add(["a", "b"])
    assert windows.close(["a", "b"], True) == 1


def test_digests_tell_decisions_apart_but_not_their_order():
    digests = []
    for names in (["a", "b"], ["b", "a"]):
        windows = Windows()
        windows.add(["a", "b"])
        for name in names:
            windows.close([name], True)
        digests.append(windows.digest)
    windows = Windows()
    windows.add(["a", "b"])
    windows.close(["a"], True)
    windows.close(["b"], False)
    assert digests[0] == digests[1] != windows.digest
