from __future__ import annotations

import pytest

from dsv4nb.errors import LoadCancelled
from dsv4nb.stream.loading import WINDOW_S, Loading
from dsv4nb.weights.progress import LoadStep


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def reading(done: int, total: int = 1000) -> LoadStep:
    return LoadStep(phase="weights", done_bytes=done, total_bytes=total, shard="a", n_shard=1, n_shards=2)


def test_the_rate_and_what_is_left_are_known_from_the_second_reading_on(clock: Clock) -> None:
    loading = Loading("m", "/m", clock=clock)
    loading.tell(LoadStep(phase="headers"))
    assert (loading.figures().rate, loading.figures().eta_s) == (None, None)
    for second in range(4):
        loading.tell(reading(100 * second))
        clock.now += 1
    told = loading.figures()
    assert (told.rate, told.eta_s, told.elapsed_s) == (100.0, 7.0, 4.0)


def test_the_rate_is_that_of_late(clock: Clock) -> None:
    loading = Loading("m", "/m", clock=clock)
    done = 0
    for second in range(60):
        done += 10 if second < 30 else 1
        loading.tell(reading(done))
        clock.now += 1
    rate = loading.figures().rate
    assert rate == pytest.approx(1), f"of the last {WINDOW_S} s"


def test_readings_are_few_however_many_tensors_there_are(clock: Clock) -> None:
    loading = Loading("m", "/m", clock=clock)
    for i in range(50_000):
        loading.tell(reading(i, 50_000))
        clock.now += 0.001
    assert len(loading._readings) <= WINDOW_S / 0.25 + 2


def test_a_cancelled_load_ends_at_its_next_step(clock: Clock) -> None:
    loading = Loading("m", "/m", clock=clock)
    loading.tell(reading(250))
    loading.cancel()
    loading.cancel()
    assert loading.figures().state == "cancelling" and loading.figures().eta_s is None and not loading.is_over
    with pytest.raises(LoadCancelled, match=r"loading m was cancelled at 30 %; nothing stays loaded") as stopped:
        loading.tell(reading(305))
    loading.fail(stopped.value)
    told = loading.figures()
    assert told.state == "cancelled" and told.error == str(stopped.value) and loading.is_over


@pytest.mark.parametrize(
    ("error", "state", "says"),
    [
        (KeyboardInterrupt(), "cancelled", "loading m was cancelled before its weights were read"),
        (ValueError("bad"), "failed", "ValueError: bad"),
    ],
)
def test_how_a_load_ends_is_told(clock: Clock, error: BaseException, state: str, says: str) -> None:
    heard: list[str] = []
    loading = Loading("m", "/m", lambda one: heard.append(one.figures().state), clock=clock)
    loading.fail(error)
    assert (loading.figures().state, heard) == (state, [state]) and loading.figures().error.startswith(says)
    clock.now += 60
    assert loading.figures().elapsed_s == 0, "the clock stops"


def test_a_load_that_ended_well_cannot_be_cancelled(clock: Clock) -> None:
    loading = Loading("m", "/m", clock=clock)
    loading.finish("facts")
    loading.cancel()
    assert (loading.figures().state, loading.info) == ("loaded", "facts")
