"""A site that has just answered asks for work again soon; one that has nothing to do burdens its server as before."""

import ast
import inspect
import time
from types import ModuleType

import pytest

from halfmoon.federation.flower.internals import LOOP, Pace, sleep_by


def test_looks_become_as_seldom_as_flowers_and_an_answer_makes_them_quick_again():
    slept: list[float] = []
    pace = Pace(slept.append)
    for seconds in (3, 3, 3, 3, 3, 3, 0.5, 0.5, 3, 3, 0.05):
        pace.sleep(seconds)
    assert slept == pytest.approx([0.2, 0.4, 0.8, 1.6, 3, 3, 0.1, 0.1, 0.2, 0.4, 0.05])


def test_an_idle_site_never_sleeps_longer_than_flowers():
    slept: list[float] = []
    pace = Pace(slept.append)
    for _ in range(5000):
        pace.sleep(3)
    assert slept[4:] == [3] * 4996


def test_all_else_is_of_the_module():
    module = ModuleType("loop")
    sleep_by(module, Pace())
    assert not hasattr(module, "time")
    vars(module)["time"] = time
    sleep_by(module, Pace())
    made = vars(module)["time"]
    assert isinstance(made, Pace)
    assert made.monotonic is time.monotonic


def test_flowers_loop_sleeps_by_its_module_and_for_as_long_as_is_known():
    """Flower promises neither: with another version this says that sites ask as seldom as its own would."""
    loop = pytest.importorskip(LOOP)
    calls = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(inspect.getsource(loop)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep"
    ]
    assert sorted(calls) == [0.5, 0.5, 3]
