"""Who rests, for how long, and that somebody is always awake."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.config import CurriculumSection, RolloutSection
from rollout_service.curriculum import Curriculum
from rollout_service.filters import Verdict


def curriculum(prompts: int = 10, **keys: object) -> Curriculum:
    return Curriculum(CurriculumSection(**({"enable": True} | keys)), prompts)  # type: ignore[arg-type]


def test_a_prompt_rests_for_whole_epochs_after_complete_solutions_in_a_row() -> None:
    state = curriculum(solved_times=2, rest_epochs=3)
    state.note("a", Verdict.SOLVE_ALL)
    assert not state.skips("a", 1)
    state.note("a", Verdict.SOLVE_ALL)
    assert [state.skips("a", epoch) for epoch in (2, 3, 4, 5)] == [True, True, True, False]
    assert not state.skips("b", 5)


def test_one_more_complete_solution_after_a_rest_is_enough_for_the_next() -> None:
    state = curriculum(solved_times=3, rest_epochs=1)
    for _ in range(3):
        state.note("a", Verdict.SOLVE_ALL)
    assert state.skips("a", 1)
    assert not state.skips("a", 2)
    state.note("a", Verdict.SOLVE_ALL)
    assert state.skips("a", 3)


@pytest.mark.parametrize("verdict", [Verdict.KEPT, Verdict.SOLVE_NONE, Verdict.CONSTANT])
def test_any_other_outcome_starts_the_count_anew_and_wakes(verdict: Verdict) -> None:
    state = curriculum(solved_times=2)
    state.note("a", Verdict.SOLVE_ALL)
    state.note("a", verdict)
    state.note("a", Verdict.SOLVE_ALL)
    assert not state.skips("a", 1)
    state.note("a", Verdict.SOLVE_ALL)
    assert state.skips("a", 1)
    state.note("a", verdict)  # an older group of the same prompt, finished late
    assert not state.skips("a", 1)


@given(
    prompts=st.integers(1, 30),
    share=st.floats(0.01, 1.0),
    solved=st.integers(1, 2),
    rest=st.integers(1, 4),
    epochs=st.integers(1, 8),
)
def test_however_well_everything_is_solved_each_epoch_has_a_prompt(
    prompts: int, share: float, solved: int, rest: int, epochs: int
) -> None:
    state = curriculum(prompts, solved_times=solved, rest_epochs=rest, max_resting_share=share)
    for epoch in range(epochs):
        awake = [f"p{i}" for i in range(prompts) if not state.skips(f"p{i}", epoch)]
        assert len(awake) >= max(1, prompts - share * prompts - 1e-6)
        for name in awake:
            state.note(name, Verdict.SOLVE_ALL)
    assert state.resting() <= min(prompts - 1, share * prompts + 1e-6)


def test_stats_count_since_the_last_reset() -> None:
    state = curriculum(solved_times=1, rest_epochs=2)
    for name in "abc":
        state.note(name, Verdict.SOLVE_ALL)
    assert [state.skips(name, 1) for name in "abcd"] == [True, True, True, False]
    assert state.stats() == {"training/curriculum/resting": 3.0, "training/curriculum/skipped": 3.0}
    state.reset_stats()
    assert state.stats() == {"training/curriculum/resting": 3.0, "training/curriculum/skipped": 0.0}


def test_disabled_it_does_nothing_and_reports_nothing() -> None:
    state = curriculum(enable=False, solved_times=1)
    state.note("a", Verdict.SOLVE_ALL)
    assert not state.skips("a", 1)
    assert state.stats() == {}


def test_state_survives_a_resume_and_a_lower_limit_wakes_those_whose_rest_ends_first() -> None:
    state = curriculum(solved_times=1, rest_epochs=4)
    state.note("early", Verdict.SOLVE_ALL)
    state.skips("other", 3)
    state.note("late", Verdict.SOLVE_ALL)
    saved = pickle.loads(pickle.dumps(state.state_dict()))
    same = curriculum(solved_times=1, rest_epochs=4)
    same.load_state_dict(saved)
    assert [same.skips(name, 4) for name in ("early", "late")] == [True, True]
    narrow = curriculum(solved_times=1, max_resting_share=0.1)
    narrow.load_state_dict(saved)
    assert [narrow.skips(name, 4) for name in ("early", "late")] == [False, True]


@pytest.mark.parametrize("section", ["curriculum", "oversampling"])
def test_curriculum_and_oversampling_need_the_filter(section: str) -> None:
    with pytest.raises(ValueError, match=rf"{section}.enable=true with filter_groups.enable=false"):
        RolloutSection.model_validate({"filter_groups": {"enable": False}, section: {"enable": True}})
