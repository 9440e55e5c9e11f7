"""The benchmarks of larder.pg: each of their rows is checked by themselves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import unittest
from typing import Any
from unittest import mock

try:
    from larder.pg import bench, p2p_bench
except ImportError as e:
    raise unittest.SkipTest("without torch") from e


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, env=environment)


class Benchmarks(unittest.TestCase):
    def rows(self, *arguments: str) -> list[list[str]]:
        made = run(*arguments)
        self.assertEqual(made.returncode, 0, made.stderr)
        return [line.split() for line in made.stdout.splitlines() if line and not line.startswith("#")]

    def test_collectives_beside_gloo(self):
        sizes = ("-b", "8", "-e", "4K", "-f", "512", "-n", "3")
        rows = self.rows("larder.pg.bench", "-g", "2", *sizes, "--compare", "gloo", "-p", "-S", "-o", "avg")
        self.assertEqual([(r[0], r[1]) for r in rows], [(name, size) for size in ("8", "4096") for name in ("larder-cpu", "gloo")])
        for row in rows:
            self.assertEqual(len(row), 6 + 2 * 6 + 2, row)  # with percentiles and the time
            self.assertEqual((row[11], row[17]), ("0", "0"), row)  # wrong elements

    def measured(self, *arguments: str) -> list[dict[str, Any]]:
        made = run("larder.pg.bench", "--json", "-b", "4K", "-e", "4K", "-n", "2", *arguments)
        self.assertEqual(made.returncode, 0, made.stderr)
        rows = json.loads(made.stdout)
        for row in rows:
            for half in (row["out_of_place"], row["in_place"]):
                self.assertEqual(half["wrong"], 0, row)
                self.assertLessEqual(half["p50_us"], half["p99_us"])
        return rows

    def test_every_operation_dtype_and_root(self):
        rows = self.measured("-g", "2", "-d", "all", "-o", "all", "-c", "2")
        self.assertEqual({r["redop"] for r in rows}, {"sum", "prod", "min", "max", "avg", "band", "bor", "bxor"})
        self.assertLessEqual({"int8", "uint8", "int64", "float16", "bfloat16", "float64"}, {r["type"] for r in rows})
        self.assertEqual([r["root"] for r in self.measured("--collective", "gather", "-g", "2", "-r", "-1", "-d", "half")], [0, 1])

    def test_operations_that_are_started_together(self):
        self.assertEqual(len(self.measured("--collective", "sendrecv", "-g", "3", "-m", "4")), 1)

    def test_messages(self):
        rows = self.rows("larder.pg.p2p_bench", "-g", "3", "-k", "2", "--tensor-bytes", "1K", "-n", "3", "-w", "1", "-c")
        self.assertEqual([(r[0], r[-1]) for r in rows], [("larder-cpu", "0")])

    def test_wrong_flags(self):
        for program, arguments, text in [
            (bench, "--collective no", "invalid choice"),
            (bench, "-J file", "--json"),
            (bench, "-t 2", "one thread"),
            (bench, "--device cuda", "host only"),
            (bench, "-d int0", "no such dtype"),
            (bench, "-r 2", "root 2 of 2"),
            (bench, "-e 1K", "the least first"),
            (p2p_bench, "-g 2 -k 2", "1 to 1"),
            (p2p_bench, "-n 0", "1 or more"),
            (p2p_bench, "--device cuda", "backends for it"),
        ]:
            said = io.StringIO()
            with self.subTest(arguments=arguments), mock.patch("sys.argv", ["bench", *arguments.split()]):
                with contextlib.redirect_stderr(said), self.assertRaises(SystemExit) as ended:
                    program.main()
                self.assertEqual(ended.exception.code, 2)
                self.assertIn(text, said.getvalue())


if __name__ == "__main__":
    unittest.main()
