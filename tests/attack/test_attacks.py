"""Each attack for a moment: nothing is lost, changed or obeyed. `make attack` measures them."""

import random

import pytest

from tests.attack import __main__ as command
from tests.attack.attacks import ATTACKS
from tests.attack.kit import Row, Run, table

SECONDS = 1.0


@pytest.mark.full
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_loses_and_changes_nothing(name, tmp_path):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}: python -m tests.attack --only {name} --seconds {SECONDS:g} --seed {seed}")
    with Run(tmp_path, SECONDS, seed) as run:
        rows = ATTACKS[name](run)
    assert rows
    for row in rows:
        print(command.line(row.cells()))
        assert not row.lost
        if row.most == 0 and row.quiet is None:  # a count of what must not happen
            assert row.ok


def test_attackers_that_do_nothing_fail_the_attack(tmp_path):
    """Its figures would say that the node keeps what nobody has tried."""
    with Run(tmp_path, 1.0, 7) as run:
        with pytest.raises(AssertionError, match="the attackers relay did nothing"):
            with run.strangers("relay", address="tcp://127.0.0.1:1", delay_ms=0):
                pass


def test_a_row_says_whether_the_target_was_kept():
    kept = Row("a", "put, ms", 0.5, 1.0, 2, True)
    slow = Row("b", "put, ms", 0.5, 1.1, 2, True, "slowest 9 ms")
    late = Row("c", "a slave links, s", 0.3, 10.5, 10)
    lost = Row("d", "put, ms", 0.5, 0.5, 2, True, lost=["LOST 3 acknowledged puts on 1"])
    never = Row("e", "files overwritten", None, 0, 0)
    assert [row.ok for row in (kept, slow, late, lost, never)] == [True, False, False, False, True]
    assert table([slow, lost, never]).splitlines()[2:] == [
        "| b | put, ms | 0.5 | 1.1 | 2.20 | 2 times | missed; slowest 9 ms |",
        "| d | put, ms | 0.5 | 0.5 | 1.00 | 2 times | missed; LOST 3 acknowledged puts on 1 |",
        "| e | files overwritten |  | 0 |  | 0 | ok |",
    ]


@pytest.mark.parametrize(("attacked", "code"), [(1.0, 0), (9.0, 1), (None, 2)])
def test_the_exit_code_says_what_came_of_it(monkeypatch, capsys, attacked, code):
    def attack(run):
        assert run.seed == 7 and run.seconds == 5.0
        if attacked is None:
            raise OSError("the attack itself failed")
        return [Row("one", "put, ms", 1.0, attacked, 2, True)]

    monkeypatch.setattr(command, "ATTACKS", {"one": attack, "other": None})
    assert command.main(["--only", "one", "--seconds", "5", "--seed", "7"]) == code
    said = capsys.readouterr()
    assert "seed 7" in said.err
    assert ("one" in said.out) == (attacked is not None)


def test_an_unknown_attack_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["--only", "tls-600,nonsense"])
    assert "no such attack: nonsense" in capsys.readouterr().err
