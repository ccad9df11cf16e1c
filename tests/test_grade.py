"""The grader: a right answer passes, and whatever else a learner hands in is a verdict, no pass."""

import gc
import os
import pickle
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from pdt import grade
from pdt.grade import Dice, Exercise, Property, Relation, Trial
from pdt.grade.expect import (
    expect_close,
    expect_int,
    expect_ops,
    expect_sent,
    expect_tensor,
    expect_unchanged,
    expect_waited,
)
from pdt.grade.judge import OWN, RETURNS, WRITTEN, judge
from pdt.grade.judge import grade as judge_submission
from pdt.grade.poison import is_unwritten, poisoned, resolve
from pdt.grade.session import Session, Submission
from tests.mutants import load

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a notebook's functions are

SUM, KEPT, CALLS = "returns the sum", "leaves its input alone", "makes one call"
TWIN = "pdt.comm.collectives.all_reduce"


def _trials(dice):
    for n in (1, 2, 3):
        yield Trial([(dice.integers((4,), torch.int64),) for _ in range(n)], "4 numbers")


def _sums(run):
    total = torch.stack([tensor for (tensor,) in run.inputs]).sum(0)
    for rank, seen in enumerate(run.ranks):
        expect_tensor(seen.result, total, f"rank {rank}'s result")


def _calls_once(run):
    for seen in run.ranks:
        expect_int(len(seen.records), 1, "the number of calls")


TOTAL = Exercise(
    name="total",
    points=2,
    minutes=5,
    trials=_trials,
    properties=(
        Property(SUM, _sums, "add."),
        Property(KEPT, lambda run: expect_unchanged(run, 0), "clone first."),
        Property(CALLS, _calls_once, "one call does."),
    ),
    poison=(TWIN,),
    timeout_s=2.0,
)


@pytest.fixture(scope="module")
def session():
    with Session(memory_gb=1.0) as live:
        yield live


def verdict_on(learner, session, exercise=TOTAL):
    return judge_submission("00_x.total", exercise, Submission.of(learner), session, seed=5)


def right(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def prints_garbage(tensor):
    print("\x00\xff" * 1000, "</failure>", flush=True)
    os.write(2, b"\xff\xfe no text at all \x1b[31m")
    return right(tensor)


def stub(tensor):
    raise NotImplementedError()


def empty(tensor):
    """Only this text."""


def dots(tensor):
    return ...


def raises(tensor):
    return tensor[99]


def torch_lacks_it(tensor):
    return torch.ops.aten.add.Tensor(tensor.to_sparse(), torch.empty(4, device="meta"))


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


def raises_what_cannot_be_said(tensor):
    raise Mute


def exits(tensor):
    sys.exit(0)


def dies(tensor):
    os._exit(0)


def loops(tensor):
    while True:
        pass


def loops_and_prints(tensor):
    while True:
        print("x" * 1000)


def skips_a_call_on_rank_1(tensor):
    return tensor if dist.get_rank() == 1 else right(tensor)


def takes_all_memory(tensor):
    return torch.ones(4 << 30, dtype=torch.uint8)[0]


class AlwaysEqual(torch.Tensor):
    def __eq__(self, other):
        return True


class AlwaysEqualInt(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def returns_an_always_equal_tensor(tensor):
    return tensor.as_subclass(AlwaysEqual)


def returns_an_always_equal_number(tensor):
    return AlwaysEqualInt(3)


class Bomb:
    def __reduce__(self):
        return os._exit, (0,)


def returns_a_bomb(tensor):
    return [Bomb()]


def returns_a_file(tensor):
    return open(os.devnull)


def returns_itself(tensor):
    found = []
    found.append(found)
    return found


def returns_nothing(tensor):
    dist.all_reduce(tensor.clone())


def returns_a_list(tensor):
    return right(tensor).tolist()


def returns_floats(tensor):
    return right(tensor).double()


def returns_zeros(tensor):
    return torch.zeros_like(right(tensor))


def writes_to_its_input(tensor):
    dist.all_reduce(tensor)
    return tensor


def calls_twice(tensor):
    dist.barrier()
    return right(tensor)


def calls_the_twin(tensor):
    from pdt.comm.collectives import all_reduce as mine

    total = tensor.clone()
    mine(total, check=False)
    return total


def hides_the_twin(tensor):
    try:
        return calls_the_twin(tensor)
    except Exception as error:
        raise ValueError("it did not work") from error


def patches_torch(tensor):
    torch.equal = torch.allclose = lambda *args, **kwargs: True
    return torch.zeros_like(tensor)


def patches_a_tensors_method(tensor):
    torch.Tensor.tolist = lambda self: [0]
    return right(tensor)


def patches_the_meter(tensor):
    from pdt.comm.record import Recorder

    Recorder.start = lambda self, record: None
    return right(tensor)


def patches_the_code_of_the_meter(tensor):
    from pdt.comm.record import Recorder

    Recorder.end.__code__ = (lambda self, record: None).__code__
    return right(tensor)


def patches_the_grader(tensor):
    from pdt.grade import guard, onrank

    guard.Gate.problem = lambda self, records: None
    onrank._pack = lambda seen: b"passed"
    return torch.zeros_like(tensor)


def clears_the_records(tensor):
    dist.barrier()
    dist.group.WORLD.recorder.meters[-1].records.clear()
    return right(tensor)


def goes_round_the_meter(tensor):
    dist.group.WORLD.inner.barrier().wait()
    return right(tensor)


def makes_a_group_that_does_not_count(tensor):
    dist.barrier(dist.new_group(backend="gloo"))
    return right(tensor)


def changes_the_default_dtype(tensor):
    torch.set_default_dtype(torch.float64)
    return right(tensor)


BAD = {
    stub: WRITTEN, empty: WRITTEN, dots: WRITTEN,
    raises: RETURNS, torch_lacks_it: RETURNS, raises_what_cannot_be_said: RETURNS,
    exits: RETURNS, dies: RETURNS, loops: RETURNS, loops_and_prints: RETURNS,
    skips_a_call_on_rank_1: RETURNS, takes_all_memory: RETURNS,
    returns_an_always_equal_tensor: RETURNS, returns_an_always_equal_number: RETURNS,
    returns_a_bomb: RETURNS, returns_a_file: RETURNS, returns_itself: RETURNS,
    returns_nothing: SUM, returns_a_list: SUM, returns_floats: SUM, returns_zeros: SUM,
    writes_to_its_input: KEPT, calls_twice: CALLS,
    calls_the_twin: OWN, hides_the_twin: OWN,
    patches_torch: OWN, patches_a_tensors_method: OWN, patches_the_meter: OWN,
    patches_the_code_of_the_meter: OWN, patches_the_grader: OWN, clears_the_records: OWN,
    goes_round_the_meter: OWN, makes_a_group_that_does_not_count: OWN,
    changes_the_default_dtype: OWN,
}  # fmt: skip


def test_the_right_answer_passes_and_its_report_is_the_same_for_every_seed(session):
    report = verdict_on(right, session)
    assert report.passed, report.text()
    assert report.points == 2
    other = judge_submission("00_x.total", TOTAL, Submission.of(right), session)
    assert other.text() == report.text()
    assert other.seed != report.seed


def test_printing_garbage_changes_nothing(session, capfd):
    assert verdict_on(prints_garbage, session).passed
    assert capfd.readouterr().out == ""


VARIANTS = (  # of another bad answer, which is tried in the quick tests
    dots, torch_lacks_it, raises_what_cannot_be_said, exits, loops_and_prints,
    returns_an_always_equal_number, returns_a_bomb, returns_itself, returns_a_list,
    hides_the_twin, patches_a_tensors_method, patches_the_code_of_the_meter,
)  # fmt: skip


@pytest.mark.parametrize(
    "learner",
    [pytest.param(bad, marks=pytest.mark.slow) if bad in VARIANTS else bad for bad in BAD],
    ids=lambda learner: learner.__name__,
)
def test_a_bad_answer_fails_by_the_right_property_and_harms_no_other(session, learner):
    report = verdict_on(learner, session)
    assert report.failed == [BAD[learner]], report.text()
    assert not report.passed
    assert report.points == 0
    failed = next(verdict for verdict in report.verdicts if verdict.status == "failed")
    assert failed.expected
    assert failed.seen
    assert failed.advice
    assert verdict_on(right, session).passed


@pytest.mark.parametrize("learner", [None, ..., threading.Lock(), Exercise])
def test_what_is_no_function_of_the_learners_fails(session, learner):
    report = verdict_on(learner, session)
    assert not report.passed
    assert len(report.failed) == 1


def test_the_twin_itself_is_recognised(session):
    report = verdict_on(resolve(TWIN), session)
    assert report.failed == [OWN]
    assert TWIN in report.text()


def test_a_number_can_be_an_answer(session):
    is_42 = Property("is 42", lambda run: expect_int(run.ranks[0].result, 42), "count again.")
    exercise = Exercise("answer", 1, 1, lambda dice: [Trial([()])], (is_42,))
    assert verdict_on(42, session, exercise).passed
    for wrong in (41, 42.0, True, "42"):
        assert verdict_on(wrong, session, exercise).failed == ["is 42"]


def _spy(tensor):
    """All that code in a rank can find by looking around: tensors, and packed inputs in frames."""
    frame, packed = sys._getframe(), []
    while frame is not None:
        packed += [
            v for v in frame.f_locals.values() if type(v) is list and v and type(v[0]) is bytes
        ]
        frame = frame.f_back
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (7,)]
    return [int(t[0]) for t in tensors], len(packed)


def test_a_rank_cannot_find_what_the_others_hold(session):
    trial = Trial([(torch.full((7,), 1000 + rank),) for rank in range(3)])
    runs, stop = session.run(
        Exercise("spy", 1, 1, lambda dice: [trial], ()), Submission.of(_spy), [trial]
    )
    assert stop is None
    for rank, seen in enumerate(runs[0].ranks):
        assert seen.result == ([1000 + rank], 0)


def test_the_same_seed_gives_the_same_inputs():
    def draw(seed):
        dice = Dice(seed)
        return dice.integer(0, 10**6), dice.choice("abcdef"), dice.normal((3,)).tolist()

    assert draw(7) == draw(7) != draw(8)
    state = torch.get_rng_state()
    draw(7)
    assert torch.equal(state, torch.get_rng_state())


def test_drawn_integers_add_up_exactly_in_every_dtype():
    dice = Dice(3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        drawn = [dice.integers((50,), dtype) for _ in range(4)]
        assert torch.equal(sum(drawn).double(), sum(each.double() for each in drawn))


def test_the_trap_bites_under_every_name_and_is_gone_afterwards():
    from pdt.comm.cost import time_s
    from pdt.comm.cost import wire_nbytes as other_name

    with pytest.raises(Exception, match=r"pdt\.comm\.cost\.wire_nbytes"):
        with poisoned(("pdt.comm.cost.wire_nbytes",)):
            other_name("send", 1, 2)
    assert other_name("send", 8, 2) == 8
    assert time_s.__code__.co_name == "time_s"


@pytest.mark.parametrize("name", ["pdt.comm.cost.nothing", "no_such_module.x", "torch.add"])
def test_a_poison_that_cannot_work_is_an_error_of_the_grader(name):
    with pytest.raises((AttributeError, ModuleNotFoundError, TypeError)):
        resolve(name)


def test_a_short_function_is_no_stub():
    assert not is_unwritten(lambda: 0)
    assert not is_unwritten(lambda x: x)
    assert not is_unwritten(len)
    assert is_unwritten(lambda: None)


def test_a_property_is_never_ok_in_doubt():
    def sure(anything):
        return None

    assert judge(Property("p", sure, ""), []).status == "unchecked"
    assert judge(Relation("r", sure, ""), [], complete=False).status == "unchecked"
    assert judge(Relation("r", sure, ""), []).status == "ok"


def test_records_reach_the_properties(session):
    def both_ways(tensor):
        n, rank = dist.get_world_size(), dist.get_rank()
        if n == 1:
            return
        work = dist.isend(tensor, (rank + 1) % n)
        dist.recv(torch.empty_like(tensor), (rank - 1) % n)
        if rank != 1:
            work.wait()
        globals()["kept"] = work

    runs, stop = session.run(TOTAL, Submission.of(both_ways), _trials(Dice(1)))
    assert stop is None
    alone, two, _ = runs
    expect_ops(two, "send", "recv")
    expect_sent(two, [32, 32], [32, 32])
    expect_waited(alone)
    with pytest.raises(grade.Wrong, match="rank 1 left send #"):
        expect_waited(two)
    with pytest.raises(grade.Wrong, match="rank 0 sends 31 bytes, seen 32"):
        expect_sent(two, [31, 32], [31, 32])
    with pytest.raises(grade.Wrong, match="send #"):
        expect_ops(two, "recv")


def test_memory_is_counted_when_asked_for(session):
    exercise = Exercise("eats", 1, 1, lambda dice: [Trial([()])], (), ledger=True)
    eats = lambda: float(torch.ones(1000).sum())  # noqa: E731
    runs, stop = session.run(exercise, Submission.of(eats), exercise.trials(Dice(1)))
    assert stop is None, stop
    assert 4000 <= sum(runs[0].ranks[0].peak.values()) <= 4100


def test_a_message_that_nobody_took_does_not_reach_the_next_trial(session):
    def leaves_one(tensor):
        if dist.get_world_size() == 2:
            works = [dist.isend(tensor, 1 - dist.get_rank())]
            globals()["kept"] = works
        return right(tensor)

    report = verdict_on(leaves_one, session)
    assert report.failed == [CALLS]
    assert verdict_on(right, session).passed


@pytest.mark.parametrize(
    ("seen", "fits"),
    [(100, True), (100.5, True), (102.0, False), (float("nan"), False), ("100", False)],
)
def test_closeness_is_relative_and_strict_about_types(seen, fits):
    if fits:
        expect_close(seen, 100.0, rel=0.01)
    else:
        with pytest.raises(grade.Wrong):
            expect_close(seen, 100.0, rel=0.01)


@pytest.mark.parametrize(
    "name", ["collectives.x", "02_collectives.nothing", "99_nothing.x", "02_report.x"]
)
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(ValueError):
        grade.check(name, right)


def test_a_failed_check_shows_the_report_and_no_traceback():
    with pytest.raises(grade.GradeError) as caught:
        grade.check("02_collectives.ring_all_reduce", stub, seed=11)
    text = "\n".join(caught.value._render_traceback_())
    assert "seed=11" in text
    assert "hint 1" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_mutants_travel_whole():
    for wrong in load("02_collectives"):
        assert b"tests.mutants" not in cloudpickle.dumps(wrong)


def test_grading_is_quick(session):
    verdict_on(right, session)
    start_s = time.perf_counter()
    for _ in range(5):
        session.run(TOTAL, Submission.of(right), _trials(Dice(1)))
    each_s = (time.perf_counter() - start_s) / 5
    start_s = time.perf_counter()
    with Session() as fresh:
        fresh.run(TOTAL, Submission.of(right), _trials(Dice(1)))
    assert each_s < (time.perf_counter() - start_s) / 2, "live ranks save the start of new ones"
