"""Who may use a buffer: one thread at a time of the process that made it, and no copy."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading

import pytest
import torch

import dg_core
from dg_core.errors import ArgumentError
from dg_core.mega.use import Use
from dg_core.testing.mega import options

TOKENS, HIDDEN = 5, 256


def buffer() -> dg_core.SymmBuffer:
    return dg_core.get_symm_buffer_for_mega_moe(
        None, 2, 16, 1, HIDDEN, 128, mma_type="bf16xbf16", device="cpu"
    )


L1, L2 = (torch.ones(2, *shape, dtype=torch.bfloat16) for shape in ((256, HIDDEN), (HIDDEN, 128)))


def call(buf: dg_core.SymmBuffer) -> torch.Tensor:
    y = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
    buf.x[:TOKENS] = 1.0
    buf.topk_idx[:TOKENS] = 1
    buf.topk_weights[:TOKENS] = 0.5
    dg_core.bf16_mega_moe(y, L1, L2, buf)
    return y


def test_a_fork_is_no_rank() -> None:
    buf = buffer()
    first = call(buf)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        # A fork has one thread only, and no operation of torch that wants more may be begun in it.
        signal.alarm(20)
        try:
            dg_core.bf16_mega_moe(first, L1, L2, buf)
            said = "it ran"
        except ArgumentError as error:
            said = str(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    assert f"was made by process {os.getpid()}; process {pid} is a fork" in said
    assert torch.equal(call(buf), first)
    buf.destroy()


def test_one_thread_at_a_time() -> None:
    use, inside, done = Use(), threading.Event(), threading.Event()

    def hold() -> None:
        with use.of("first"):
            inside.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    with (
        pytest.raises(ArgumentError, match="2: sym_buffer is in use"),
        use.of("2"),
    ):
        pass
    done.set()
    thread.join()
    with use.of("third"):  # given back
        pass
    with pytest.raises(ZeroDivisionError), use.of("fourth"):
        raise ZeroDivisionError
    with use.of("fifth"):
        pass


def test_a_buffer_is_not_copied() -> None:
    buf = buffer()
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a SymmBuffer cannot be copied or pickled"):
            copied(buf)
    call(buf)
    buf.destroy()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-processes", "0"], "--num-processes is 0; it must be at least 1"),
        (["--num-tokens", "500", "--num-max-tokens-per-rank", "384"], "500 tokens of a rank are more than"),
        (["--num-tokens-per-rank-list", "1,900", "--num-max-tokens-per-rank", "384"], "900 tokens of a rank"),
    ],
)
def test_options_that_contradict_each_other(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options.parse(words, "w8a8")
    assert message in capsys.readouterr().err
