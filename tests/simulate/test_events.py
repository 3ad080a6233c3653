from nfdt.simulate.events import Activity, Agenda, Signal


def test_events_happen_in_their_order_and_equal_times_in_the_order_they_were_planned():
    agenda, seen = Agenda(), []
    for when, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        agenda.at(when, lambda name=name: seen.append((agenda.now(), name)))
    while agenda.step():
        pass
    assert seen == [(1.0, "first"), (1.0, "second"), (2.0, "late")]
    assert agenda.events == 3


def test_what_is_past_is_done_now():
    agenda, seen = Agenda(), []
    agenda.at(3.0, lambda: agenda.at(1.0, lambda: seen.append(agenda.now())))
    while agenda.step():
        pass
    assert seen == [3.0]


def test_an_activity_sleeps_waits_and_is_ended():
    agenda, seen = Agenda(), []
    signal = Signal(agenda)

    def steps():
        yield 2.0
        seen.append(agenda.now())
        seen.append((yield signal))
        seen.append(agenda.now())
        yield 10.0
        seen.append("never")

    activity = Activity(agenda, steps())
    agenda.at(5.0, lambda: signal.fire("news"))
    agenda.at(6.0, activity.end)
    while agenda.step():
        pass
    assert seen == [2.0, "news", 5.0]


def test_a_signal_that_has_been_fired_is_not_waited_for():
    agenda, seen = Agenda(), []
    signal = Signal(agenda)
    signal.fire(1)
    signal.fire(2)
    signal.wait(seen.append)
    while agenda.step():
        pass
    assert seen == [1]
