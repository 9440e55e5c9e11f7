"""Options and names of larder.pg, which need no other process."""

from __future__ import annotations

import unittest
from itertools import product

try:
    import torch
except ImportError as e:
    raise unittest.SkipTest("without torch") from e

import larder
from larder import pg
from processes import Case


class Options(unittest.TestCase):
    def test_mooncakes_constructors(self):
        mask = torch.zeros(8, dtype=torch.int32)
        make = pg.MooncakeBackendOptions
        for made, size, extension, flags in [
            (make(8), 8, False, (True, True)),
            (make(8, True), 8, True, (True, True)),
            (make(max_group_size=8, is_extension=True), 8, True, (True, True)),
            (make(max_world_size=8), 8, False, (True, True)),
            (make(8, False, True, False), 8, False, (True, False)),
            (make(8, False, False, False), 8, False, (False, False)),
            (make(mask), 0, False, (True, True)),
            (make(mask, True), 0, True, (True, True)),
            (make(mask, True, 6), 6, True, (True, True)),
            (make(active_ranks=mask, is_extension=False, max_group_size=6), 6, False, (True, True)),
        ]:
            with self.subTest(made=made):
                self.assertEqual((made.max_group_size, made.is_extension), (size, extension))
                self.assertEqual((made.auto_deactivate_on_failure, made.auto_sync_on_failure), flags)
                self.assertEqual((made.retry, made.raise_on_failure), (True, False))

    def test_there_are_no_others(self):
        for arguments in [(8, False, True), (8, False, True, True, True)]:
            with self.subTest(arguments=arguments), self.assertRaisesRegex(TypeError, "max_group_size"):
                pg.MooncakeBackendOptions(*arguments)
        with self.assertRaises(TypeError):
            pg.MooncakeBackendOptions(8, max_group_size=8)

    def test_checks(self):
        for options, text in [
            (pg.BackendOptions(max_group_size=3), "from 4"),
            (pg.BackendOptions(max_group_size=4096), "to 1024"),
            (pg.BackendOptions(auto_deactivate_on_failure=False), "auto_sync_on_failure requires"),
            (pg.BackendOptions(active_ranks=torch.zeros(4)), "must be contiguous int32"),
            (pg.BackendOptions(active_ranks=torch.zeros(3, dtype=torch.int32)), "at least 4"),
            (pg.BackendOptions(active_ranks=torch.zeros(8, dtype=torch.int32)[::2]), "contiguous"),
        ]:
            with self.subTest(options=options), self.assertRaisesRegex(larder.InvalidArgumentError, text):
                options.capacity(4)
        self.assertEqual(pg.BackendOptions(max_group_size=-1).capacity(4), 4)

    def test_policies(self):
        got = {}
        for deactivate, sync in product((True, False), repeat=2):
            got[deactivate, sync] = pg.BackendOptions(auto_deactivate_on_failure=deactivate, auto_sync_on_failure=sync).failures
        self.assertEqual([got[True, True], got[True, False], got[False, False]], ["automatic", "deferred", "manual"])

    def test_settings(self):
        for call, text in [
            (lambda: pg.set_host_ip(""), "empty"),
            (lambda: pg.set_p2p_timeout_us(-1), "-1 us"),
            (lambda: pg.set_fault_reconciliation_window_us(-1), "-1 us"),
            (lambda: pg.set_transfer_engine("engine"), "no larder.TransferEngine"),
        ]:
            with self.subTest(text), self.assertRaisesRegex(larder.InvalidArgumentError, text):
                call()


class Compatibility(Case):
    def test_mooncakes_names_come_on_request_only(self):
        self.assertEqual(
            self.program("import larder.pg, torch.distributed as d, importlib.util as u; print(hasattr(d.Backend, 'MOONCAKE'))"), "False"
        )

    def test_the_module_and_both_backends(self):
        for way in ("", "; larder.pg.install_compat()"):
            with self.subTest(way=way):
                said = self.program(
                    f"import larder.pg{way}\nfrom mooncake import pg\nimport mooncake.pg, torch.distributed as d\n"
                    "print(*[d.Backend(b).lower() for b in ('mooncake', 'mooncake-cpu')], pg.MooncakeBackendOptions(8).max_group_size,"
                    " pg.recover_ranks is larder.pg.activate_ranks, callable(pg.createMooncakeBackend))",
                    LARDER_PG_COMPAT="" if way else "mooncake",
                )
                self.assertEqual(said, "mooncake mooncake-cpu 8 True True")

    def test_the_real_one_is_left_alone(self):
        said = self.program(
            "import sys, types\nreal = types.ModuleType('mooncake.pg')\nsys.modules['mooncake.pg'] = real\nimport larder.pg\n"
            "try: larder.pg.install_compat()\nexcept larder.LarderError as e: print(e, sys.modules['mooncake.pg'] is real)"
        )
        self.assertRegex(said, "^the real mooncake.pg is installed.* True$")

    def test_its_environment(self):
        said = self.program(
            "from larder.pg import _registry\nprint(_registry.mooncake_defaults().failures)",
            MOONCAKE_PG_AUTO_SYNC_ON_FAILURE="0",
        )
        self.assertEqual(said, "deferred")


if __name__ == "__main__":
    unittest.main()
