"""Tests of report.py. Run by `verification/run` before anything else."""

import json
import os
import tempfile
import unittest

import report

GOOD = {"clause": "2 Counting", "claim": "fires once", "method": "loom", "bound": "3 threads", "seconds": 1.25}


def line(**changes):
    entry = {**GOOD, **changes}
    return json.dumps({name: value for name, value in entry.items() if value is not None})


class Parsing(unittest.TestCase):
    def test_a_good_line_is_read(self):
        self.assertEqual(report.parse(line()), GOOD)
        self.assertEqual(report.mutant_counts(report.parse(line(mutants="6/7"))), (6, 7))
        self.assertEqual(report.parse(line(clause="code"))["clause"], "code")

    def test_what_cannot_be_believed_is_refused(self):
        bad = [
            "", "{", "[]", "1", line(clause=None), line(clause="8 Speed"), line(claim=""), line(claim=3),
            line(method="proved"), line(bound=None), line(bound=3), line(seconds=None), line(seconds="1"),
            line(seconds=True), line(mutants="7"), line(mutants="8/7"), line(mutants="0/0"), line(mutants="-1/2"),
            line(clause=" "),
        ]
        for text in bad:
            with self.subTest(text), self.assertRaises(report.BadLine):
                report.parse(text)

    def test_a_survivor_is_noticed(self):
        self.assertTrue(report.survived(report.parse(line(mutants="6/7"))))
        self.assertFalse(report.survived(report.parse(line(mutants="7/7"))))
        self.assertFalse(report.survived(report.parse(line())))

    def test_a_skipped_check_needs_a_reason_and_no_bound(self):
        entry = report.parse(line(bound=None, skipped="no such tool"))
        self.assertEqual(report.status(entry), "not run")

    def test_lines_come_back_as_they_were_written(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "report")
            before = os.environ.get("IMMWIRE_REPORT")
            os.environ["IMMWIRE_REPORT"] = path
            try:
                report.claim("code", "a", "build", "b", 1.26, mutants=(2, 3))
                report.skipped("4 Time", "c", "tested", "d")
            finally:
                os.environ.pop("IMMWIRE_REPORT")
                if before is not None:
                    os.environ["IMMWIRE_REPORT"] = before
            with open(path) as lines:
                first, second = map(report.parse, lines.read().splitlines())
        self.assertEqual((first["mutants"], first["seconds"], first["bound"]), ("2/3", 1.3, "b"))
        self.assertEqual(second["skipped"], "d")


class Tables(unittest.TestCase):
    def test_clauses_are_in_order_and_the_stronger_method_first(self):
        entries = [report.parse(line(clause=c, method=m, claim=c + m))
                   for c, m in [("code", "build"), ("2 Counting", "tested"), ("2 Counting", "loom"), ("1 x", "tested")]]
        shown = [row[1] for row in report.rows(entries)]
        self.assertEqual(shown, ["1 xtested", "2 Countingloom", "2 Countingtested", "codebuild"])

    def test_skipped_and_failed_stand_out(self):
        entries = [report.parse(line(skipped="no tool")), {**report.parse(line(claim="z")), "failed": True}]
        table = report.markdown(entries)
        self.assertIn("| NOT RUN (loom) | no tool |", table)
        self.assertIn("| z | FAILED (loom) |", table)
        said = report.summary(entries)
        self.assertIn("**2. Counting**: 0 claims hold; not broken on purpose in this run; 1 FAILED, 1 not run.", said)
        self.assertIn("**1. Transport**: no check reports on it.", said)

    def test_a_cell_cannot_break_the_table(self):
        table = report.markdown([report.parse(line(claim="a|b\nc"))])
        self.assertIn(r"| a\|b c |", table)
        self.assertEqual(len(table.splitlines()), 3)

    def test_times_are_said_to_the_second(self):
        said = {0: "0.0 s", 99.94: "99.9 s", 119.4: "1 min 59 s", 119.6: "2 min", 128: "2 min 8 s", 3600: "60 min"}
        self.assertEqual({seconds: report.duration(seconds) for seconds in said}, said)

    def test_mutants_are_summed_over_what_holds(self):
        entries = [report.parse(line(mutants="3/3")), report.parse(line(claim="y", mutants="4/4"))]
        self.assertIn("2 claims hold (loom); broken on purpose 7 times, noticed 7 times.", report.summary(entries))

    def test_a_mutant_is_its_package_s_and_its_test_s(self):
        printed = "\n".join([
            "all mutants built at once, in 3 s",
            "core-a       caught      0.1 s  immwire-core/region::tests::a",
            "core-b       SURVIVED    0.1 s  immwire-core/region::tests::b",
            "platform-a   caught      0.1 s  immwire/region::tests::a",
            "kernel-a     NO END in 60 s   60.0 s  immwire-verification-moe/sums",
            "3 of 4 caught",
        ])
        mutants = report.mutants_of(printed)
        self.assertEqual(mutants[2:], [("immwire", "region::tests::a", True), ("immwire-verification-moe", "sums", False)])
        claims = [{"claim": "r", "check": "region::"}, {"claim": "s", "check": "sums"}, {"claim": "t"}]
        left = report.credit(claims, mutants)
        self.assertEqual([claim.get("mutants") for claim in claims], ["1/2", "0/1", None])
        self.assertEqual([entry["mutants"] for entry in left], ["1/1"])


if __name__ == "__main__":
    unittest.main()
