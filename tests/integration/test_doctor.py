"""`rvbundle doctor` on the machine that runs the tests (what else it may find: tests/bad/doctor-*)."""

import json
import platform

from tests.conftest import Cli


def test_what_it_says_of_this_machine(cli: Cli) -> None:
    result = cli("doctor")
    assert result.err == ""
    lines = result.out.splitlines()
    assert lines[0] == f"ok    kernel      Linux {platform.release()} on {platform.machine()}"
    failed = any(line.startswith("fail") for line in lines)
    assert result.code == (110 if failed else 0)
    findings = json.loads(cli("doctor", "--json").out)
    topics = [line[6:18].strip() for line in lines if not line.startswith(" ")]
    assert [finding["topic"] for finding in findings] == topics


def test_a_machine_that_runs_images_has_no_failure(cli: Cli) -> None:
    """The tests themselves run images in sandboxes, so nothing may be found that prevents it."""
    result = cli("doctor")
    assert [line for line in result.out.splitlines() if line.startswith("fail")] == []
    assert result.code == 0
