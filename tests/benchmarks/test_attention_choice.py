"""The script that says on a GPU which attention is taken, on a CPU."""

import torch

from benchmarks.gpu_session import attention_choice

SMALL = ((2, 1, 40, 16, {}), (2, 2, 33, 8, {"window_size": (8, 0)}), (2, 1, 24, 8, {"sink": True}))


def test_it_names_what_was_taken_and_refused(monkeypatch, capsys):
    monkeypatch.setattr(attention_choice, "CALLS", SMALL)
    assert attention_choice.main("cpu") == 0
    said = capsys.readouterr().out
    assert said.count("took flash: ") == 2 and said.count("took this package's: ") == 3
    assert "backend='flash' cannot do this call: on CPUs it takes neither windows" in said
    assert said.endswith("all right\n")


def test_a_wrong_result_is_found(monkeypatch, capsys):
    monkeypatch.setattr(attention_choice, "CALLS", SMALL[:1])
    function = attention_choice.flash_attention
    monkeypatch.setattr(attention_choice, "flash_attention", lambda *a, **o: function(*a, **o) * 1.1)
    assert attention_choice.main("cpu") == 1
    assert "WRONG" in capsys.readouterr().out


def test_an_error_of_a_kernel_is_found(monkeypatch, capsys):
    def broken(*_, **__):
        raise torch.cuda.OutOfMemoryError("none left")

    monkeypatch.setattr(attention_choice, "CALLS", SMALL[:1])
    monkeypatch.setattr(attention_choice, "flash_attention", broken)
    assert attention_choice.main("cpu") == 1
    assert "RAISED none left" in capsys.readouterr().out
