"""The benchmarks of larder.pg: each of their rows is checked by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

try:
    import torch  # noqa: F401 - the benchmarks need it
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
        rows = self.rows("larder.pg.bench", "-g", "2", "-b", "8", "-e", "4K", "-f", "512", "-n", "3", "--compare", "gloo")
        self.assertEqual([(r[0], r[1]) for r in rows], [(name, size) for size in ("8", "4096") for name in ("larder-cpu", "gloo")])
        for row in rows:
            self.assertEqual((row[8], row[12]), ("0", "0"), row)  # wrong elements

    def test_messages(self):
        rows = self.rows("larder.pg.p2p_bench", "-g", "3", "-k", "2", "--tensor-bytes", "1K", "-n", "3", "-w", "1", "-c")
        self.assertEqual([(r[0], r[-1]) for r in rows], [("larder-cpu", "0")])

    def test_wrong_flags(self):
        for arguments, text in [
            (("larder.pg.bench", "--collective", "no"), "invalid choice"),
            (("larder.pg.p2p_bench", "-g", "2", "-k", "2"), "1 to 1"),
            (("larder.pg.p2p_bench", "-n", "0"), "1 or more"),
        ]:
            with self.subTest(arguments=arguments):
                made = run(*arguments)
                self.assertEqual(made.returncode, 2)
                self.assertIn(text, made.stderr)


if __name__ == "__main__":
    unittest.main()
