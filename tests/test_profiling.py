from maml_rl.profiling import NULL_TIMER, StageTimer


def test_timer_adds_up_stages_and_averages_quantities_until_they_are_taken() -> None:
    timer = StageTimer()
    with timer.stage("inference"):
        pass
    timer.add("inference", 2.0)
    timer.add("waiting", -1.0)
    for value in (1.0, 4.0):
        timer.observe("children", value)
    seconds = timer.take()
    assert 2.0 <= seconds["inference"] < 3.0
    assert seconds["waiting"] == -1.0
    assert timer.take_means() == {"children": 2.5}
    assert timer.take() == timer.take_means() == {}
    with NULL_TIMER.stage("inference"):
        NULL_TIMER.add("waiting", 1.0)
        NULL_TIMER.observe("children", 1.0)
    assert NULL_TIMER.take() == NULL_TIMER.take_means() == {}


def test_time_is_moved_between_stages_up_to_the_available_time() -> None:
    timer = StageTimer()
    timer.add("waiting", 2.0)
    timer.move("waiting", "physics", 0.5)
    timer.move("waiting", "physics", 5.0)
    assert timer.take() == {"waiting": 0.0, "physics": 2.0}
