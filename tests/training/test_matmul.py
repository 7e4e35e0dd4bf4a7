import pytest
import torch

from softmax_rnn.training.matmul import widest_float32_products


def test_products_keep_every_digit_of_float32() -> None:
    a, b = torch.randn(2, 300, 130, dtype=torch.float64).unbind(0)
    with widest_float32_products():
        error = (a.float() @ b.float().T - a @ b.T).abs().max()
    assert error < 1e-4  # bfloat16 and tf32 are off by more than 1e-2


def test_the_setting_is_put_back_even_after_an_error() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(KeyError), widest_float32_products():
        raise KeyError
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_nothing_is_switched_if_digits_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softmax_rnn.training.matmul._keeps_float32", lambda: False)
    with widest_float32_products() as switched:
        assert not switched
