"""What notebook kernels do to training, in a real one: interrupts, cells run twice, reloads, errors that keep memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import pytest
from kernel_page import Page, kernel_page

pytestmark = [pytest.mark.colab, pytest.mark.filterwarnings("default")]  # jupyter_client's own warnings are not ours

SETUP = """
import gc, importlib, sys, threading, weakref
from colabtrain import MMJev, start
from colabtrain.mmjev.demo_data import help_desk
from toy_task import LentTask

jev, data, main = MMJev.tiny(0), help_desk(40), threading.main_thread().ident

def workers():
    return [thread for thread in threading.enumerate() if thread.name == "colabtrain-train"]

def go_on(run, steps=2):
    'Whether the run makes steps.'
    wanted = run.step + steps
    while run.state in ("starting", "running") and run.step < wanted:
        run.wait(0.01)
    return run.step >= wanted

def names():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "colabtrain")

def tell(function):
    'Say so once the main thread is in `function`.'
    def look():
        while True:
            frame = sys._current_frames()[main]
            while frame and frame.f_code.co_name != function:
                frame = frame.f_back
            if frame:
                print("inside", flush=True)
                return
            threading.Event().wait(0.01)
    threading.Thread(target=look).start()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with kernel_page(tmp_path_factory.mktemp("kernel")) as page:
        yield page


@pytest.fixture
def page(kernel: Page) -> Iterator[Page]:
    """The shared kernel, with a new model each time, and without a live run before and after."""
    kernel.run(SETUP)
    yield kernel
    kernel.run("for thread in workers(): thread.job.stop()")
    assert kernel.run("len(workers())") == "0"


def interrupt(page: Page, inside: str, code: str) -> tuple[str, float]:
    """Interrupt the kernel once `code` is in the function `inside`: (the error, seconds until the page had it)."""
    request = page.send(f"tell({inside!r})\n{code}")
    page.listen(lambda m: m["msg_type"] == "stream" and "inside" in m["content"]["text"])
    started = time.monotonic()
    page.manager.interrupt_kernel()
    page.listen(lambda m: m["msg_type"] == "error" and m["parent_header"]["msg_id"] == request)
    seconds = time.monotonic() - started
    reply = page.ended(request)
    return f"{reply['ename']}: {reply['evalue']}", seconds


# Interrupts


def test_an_interrupt_of_wait_leaves_the_run_alive(page: Page) -> None:
    page.run("run = start(jev, data, run_dir='waited', steps=10**6, display=False)")
    error, seconds = interrupt(page, "_await_end", "run.wait()")
    assert error.startswith("KeyboardInterrupt: only wait() was interrupted: the run is ")
    assert error.endswith("run.stop() stops it") and seconds < 1.0
    assert page.run("go_on(run)") == "True"
    assert page.run("run.stop(), run.saved_step == run.step > 0, len(workers())") == "('stopped', True, 0)"


def test_an_interrupt_of_who_waits_to_borrow_leaves_the_run_alive(page: Page) -> None:
    page.run(
        "reached, go = threading.Event(), threading.Event()\n"
        "def halt(i):\n    if i == 2:\n        reached.set()\n        go.wait()\n"
        "run = start(task=LentTask(10**6, halt), run_dir='asked', display=False)\nreached.wait()"
    )
    for call in ("with run.borrow(): pass", "run.checkpoint(wait=True)"):
        error, seconds = interrupt(page, "_await", call)
        assert error == "KeyboardInterrupt: " and seconds < 1.0
    assert page.run("run.step") == "2"
    assert page.run("go.set()\ngo_on(run)") == "True"
    assert page.run("with run.borrow() as model: training = model.training\ntraining, go_on(run)") == "(False, True)"


def test_an_interrupt_of_a_borrower_leaves_the_run_alive(page: Page) -> None:
    page.run("run = start(task=LentTask(10**6), run_dir='held', display=False)")
    body = "def body():\n    while True: threading.Event().wait(0.01)\nwith run.borrow(): body()"
    error, seconds = interrupt(page, "body", body)
    assert error == "KeyboardInterrupt: " and seconds < 1.0
    assert page.run("import torch\ntorch.is_grad_enabled(), go_on(run), run.stop()") == "(True, True, 'stopped')"


# One run, however often its cell is run


def test_the_same_cell_twice_is_one_run(page: Page) -> None:
    cell = "run = start(jev, data, run_dir='twice', steps=10**6)"
    assert page.shown_by(cell) == ["display_data"]
    page.run("first = run")
    assert page.shown_by(cell) == ["display_data"]
    assert page.run("run is first, len(workers()), go_on(run)") == "(True, 1, True)"
    page.run("del run")
    page.run(f"jev, data = MMJev.tiny(0), help_desk(40)\n{cell}")  # Run all
    assert page.run("run is first, len(workers()), go_on(run)") == "(True, 1, True)"


def test_a_live_run_is_found_after_its_modules_were_reloaded(page: Page) -> None:
    cell = "run = start(jev, data, run_dir='reloaded', steps=10**6, display=False)"
    page.run(f"{cell}\nfirst = run")
    page.run("import colabtrain\nimportlib.reload(colabtrain)\nfrom colabtrain import MMJev, start")
    page.run(cell)
    assert page.run("run is first, len(workers())") == "(True, 1)"
    page.run("for name in names(): importlib.reload(sys.modules[name])\nfrom colabtrain import MMJev, start")
    page.run(cell)
    assert page.run("run is first, len(workers()), go_on(run)") == "(True, 1, True)"


def test_a_live_run_is_found_after_its_modules_were_imported_anew(page: Page) -> None:
    cell = "run = start(jev, data, run_dir='anew', steps=10**6, display=False)"
    page.run(f"{cell}\nfirst = run\ngo_on(run)")
    page.run("for name in names(): del sys.modules[name]\nfrom colabtrain import MMJev, Run, start")
    page.run("from colabtrain.mmjev.demo_data import help_desk")
    page.run(f"jev, data = MMJev.tiny(0), help_desk(40)\n{cell}")
    assert page.run("run is first, isinstance(run, Run), len(workers()), go_on(run)") == "(True, False, 1, True)"
    error = page.fail(cell.replace("10**6", "7"))
    assert error.startswith("AlreadyRunning: <colabtrain run ") and "steps: the live run has 1000000, now 7" in error
    page.run(cell.replace(")", ", replace=True)"))
    assert page.run("first.state, run is first, isinstance(run, Run), len(workers()), go_on(run)") == "('stopped', False, True, 1, True)"


def test_other_settings_are_refused_or_replace_the_live_run(page: Page) -> None:
    page.run("run = first = start(jev, data, run_dir='replaced', steps=10**6, display=False)\ngo_on(run)")
    error = page.fail("start(jev, data, run_dir='replaced', steps=5)")
    assert "steps: the live run has 1000000, now 5" in error and "replace=True" in error
    error = page.fail("start(jev, data, run_dir='replaced', steps=10**6, batch_size=2, replace=True)")
    assert "trains something else in this folder (config.batch_size: the live run has 4, now 2)" in error
    assert page.run("run.state, go_on(run)") == "('running', True)"
    page.run("run = start(jev, data, run_dir='replaced', steps=10**7, replace=True, display=False)")
    assert page.run("first.state, first.thread.is_alive(), len(workers()), go_on(run)") == "('stopped', False, 1, True)"
    assert page.run("open('replaced/train.log').read().count(f'resumed from step {first.step:,} of')") == "1"


# A free kernel


def test_cells_answer_while_a_run_computes(page: Page) -> None:
    page.run("run = start(jev, data, run_dir='busy', steps=10**6, batch_size=16, display=False)\ngo_on(run)")
    seconds: list[float] = []
    for _ in range(7):
        started = time.monotonic()
        assert page.run("1 + 1") == "2"
        seconds.append(time.monotonic() - started)
    assert statistics.median(seconds) < 1.0
    assert page.run("go_on(run)") == "True"


# What keeps memory


def test_free_lets_go_of_what_errors_keep(page: Page) -> None:
    page.run("mine = MMJev.tiny(1)\nmodel = weakref.ref(mine)\nrun = start(mine, data, run_dir='freed', steps=2)\nrun.wait()")
    assert page.run("run").startswith("<colabtrain run")  # Out and _ have it now
    assert page.fail("mine.encode_state([None], None)").startswith("AttributeError")  # frames of ours, with the model in them
    assert page.fail("1 +").startswith("SyntaxError")  # the interpreter's last error; IPython still has the one before
    assert page.run("del mine\ngc.collect()\nmodel() is None") == "False"
    assert page.run("run.free()\nmodel() is None") == "True"
    assert page.fail("with run.borrow(): pass").startswith("RuntimeError: this run has let go of its model")


def test_free_lets_go_of_the_last_error_itself(page: Page) -> None:
    page.run("mine = MMJev.tiny(1)\nmodel = weakref.ref(mine)\nrun = start(mine, data, run_dir='freed', steps=2)\nrun.wait()")
    assert page.fail("mine.encode_state([None], None)").startswith("AttributeError")
    assert page.run("del mine\nrun.free()\nmodel() is None, hasattr(sys, 'last_value'), hasattr(sys, 'last_traceback')") == (
        "(True, False, False)"
    )


def test_free_leaves_an_error_of_your_own_alone(page: Page) -> None:
    page.run("run = start(jev, data, run_dir='own', steps=1)\nrun.wait()")
    assert page.fail("1 / 0").startswith("ZeroDivisionError")
    page.run("run.free()")
    assert page.run("repr(sys.last_value), sys.last_value.__traceback__ is not None, get_ipython().InteractiveTB.tb is not None") == (
        "(\"ZeroDivisionError('division by zero')\", True, True)"
    )
