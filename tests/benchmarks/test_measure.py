from fastrack._bench.measure import interleave


def test_runs_are_interleaved_after_one_to_warm_up():
    order = []
    times = interleave({name: lambda name=name: order.append(name) for name in "ab"}, 2)
    assert order == ["a", "b", "a", "b", "a", "b"]
    assert [len(runs) for runs in times.values()] == [2, 2]
