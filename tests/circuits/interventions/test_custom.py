from circuits import edit, run


def test_results_in_other_forms(causal, tokens):
    expected = run(causal, tokens, edit("z.0", lambda z: (z > 0).double()))
    for function in (lambda z: z > 0, lambda z: (z > 0).int(), lambda z: (z > 0).numpy()):
        assert bool((run(causal, tokens, edit("z.0", function)) == expected).all())
    assert not bool((expected == causal(tokens)).all())
