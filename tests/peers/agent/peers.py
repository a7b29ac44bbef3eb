"""What others' test suites say inside an image: numpy's tests, torch's operators, gymnasium's environments.

Each command writes a JSON object of results to a file, to be compared with that of another place.
"""

import hashlib
import json
import sys


def trace():
    """The workload: almost nothing, so that almost everything has to be restored."""
    import gymnasium
    import numpy
    import torch

    gymnasium.make("CartPole-v1").reset(seed=0)
    print(float(torch.ones(2, 2).sum()), float(numpy.ones(3).sum()))


def numpy_suite(output, *selection):
    """Run numpy's own tests; those that need a compiler are left out."""
    import os

    import numpy
    import pytest

    class Results:
        def __init__(self):
            self.found = {}

        def pytest_runtest_logreport(self, report):
            if report.when == "call" or report.outcome != "passed":
                self.found[report.nodeid] = report.outcome

        def pytest_collectreport(self, report):
            if report.outcome == "failed":
                self.found[f"collecting {report.nodeid}"] = report.outcome

    results = Results()
    root = os.path.dirname(numpy.__file__)
    needs_compiler = (
        "f2py",
        "distutils",
        "test_cython",
        "test_limited_api",
        "test_mem_policy",
        "test_extending",
    )
    words = [f"--ignore-glob={root}/*{name}*" for name in needs_compiler]
    words += ["--continue-on-collection-errors"]
    words += [
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-m",
        "not slow",
        "-W",
        "default",
    ]
    words += ["--rootdir", root, "-c", os.devnull, "--tb=short"]
    pytest.main([*words, *(selection or [root])], plugins=[results])
    write(output, results.found)


def ops(output, part="0", parts="1"):
    """Run every operator of torch's database that has CPU float32 samples on its own sample inputs."""
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    torch.set_num_threads(1)
    found = {}
    for op in op_db[int(part) :: int(parts)]:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        if torch.float32 not in op.supported_dtypes("cpu"):
            continue
        digest = hashlib.sha256()
        torch.manual_seed(0)
        try:
            for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
                torch.manual_seed(0)
                try:
                    describe(op(sample.input, *sample.args, **sample.kwargs), digest)
                except Exception as error:  # noqa: BLE001 some samples are made to fail
                    digest.update(f"{type(error).__name__}: {error}".encode())
        except Exception as error:  # noqa: BLE001
            digest.update(f"samples: {type(error).__name__}: {error}".encode())
        found[name] = digest.hexdigest()
    write(output, found)


def describe(value, digest):
    """Feed a digest with all bytes of the tensors in a result."""
    import torch
    from torch.utils._pytree import tree_leaves

    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach()
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)} {leaf.layout}".encode())
            if leaf.layout != torch.strided:
                leaf = leaf.to_dense()
            if leaf.is_quantized:
                leaf = leaf.int_repr()
            data = leaf.resolve_conj().resolve_neg().contiguous().view(-1)
            if data.numel():
                digest.update(bytes(data.view(torch.uint8).numpy()))
        else:
            digest.update(repr(leaf).encode())


def environments(output):
    """Take 500 seeded steps in every registered classic-control, toy-text and box2d environment."""
    import gymnasium

    found = {}
    for name, spec in sorted(gymnasium.registry.items()):
        entry = str(spec.entry_point)
        if not any(f".envs.{kind}." in entry for kind in ("classic_control", "toy_text", "box2d")):
            continue
        env = gymnasium.make(name)
        digest = hashlib.sha256()
        observation, _ = env.reset(seed=1)
        env.action_space.seed(1)
        for _ in range(500):
            digest.update(repr(observation).encode())
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            digest.update(repr((float(reward), bool(terminated), bool(truncated))).encode())
            if terminated or truncated:
                observation, _ = env.reset()
        env.close()
        found[name] = digest.hexdigest()
    write(output, found)


def write(path, value):
    """Write results as JSON."""
    with open(path, "w") as file:
        json.dump(value, file, indent=0, sort_keys=True)
    print(len(value), "results")


if __name__ == "__main__":
    commands = {"trace": trace, "numpy": numpy_suite, "ops": ops, "environments": environments}
    commands[sys.argv[1]](*sys.argv[2:])
