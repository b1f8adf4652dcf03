"""Tests of switches.py. Run by `verification/run` before anything else."""

import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

import switches

RUST = """
/// A { that is none, and a lifetime that is no character.
pub const fn first<'a>(text: &'a str) -> Result<Array<u8, { 1 + 1 }>, char> {
    match text { "{" => Err('{'), _ => Err('\\''), }
}
fn outer(n: u32) -> u32 {
    fn inner(n: u32) -> u32 { n + 1 }
    r#"}"#.len() as u32 + inner(n) /* } */
}
trait Shape { fn area(&self) -> [u32; 2]; }
fn odd(numbers: &[u32]) -> impl Iterator<Item = &u32> { numbers.iter().filter(|n| *n % 2 == 1) }
const MOST: u32 = 7;
"""
MAIN = """
#[derive(Debug)]
pub struct Array<T, const N: usize>([T; N]);
fn main() {
    let numbers = [1, 2, 3];
    println!("{:?} {:?} {} {:?}", first("{"), first("x"), outer(1), odd(&numbers).collect::<Vec<_>>());
}
"""
CPP = """
#include <cstdio>
#define NOTHING {
namespace {
struct Pair { int a; int sum(int b) const { return a + b; } };
}  // namespace
int twice(int n) { if (n > 0) { return n * 2; } return '{' - '{'; }
"""


def break_of(number, old, new, **more):
    return {"number": number, "old": old, "new": new, **more}


class Switching(unittest.TestCase):
    def outputs(self, compiler, name, text, numbers):
        """What the program prints with each of these breaks on."""
        with tempfile.TemporaryDirectory() as folder:
            source, program = Path(folder) / name, Path(folder) / "program"
            source.write_text(text)
            subprocess.run([*compiler, source, "-o", program], check=True, capture_output=True)
            environment = [{} if number is None else {switches.VARIABLE: str(number)} for number in numbers]
            return [subprocess.check_output([program], env=one, text=True).strip() for one in environment]

    @unittest.skipUnless(shutil.which("rustc"), "there is no rustc")
    def test_each_break_of_rust_is_on_when_it_is_asked_for(self):
        text = switches.switched(RUST, [
            break_of(4, "Err('{')", "Err('(')"),
            break_of(5, "{ n + 1 }", "{ n + 2 }"),
            break_of(6, "*n % 2 == 1", "*n % 2 == 0", expression=True),
        ])
        found = self.outputs(["rustc", "--edition=2024", "-Awarnings"], "a.rs", text + MAIN, [None, 3, 4, 5, 6])
        right = """Err('{') Err('\\'') 3 [1, 3]"""
        self.assertEqual(found, [right, right, """Err('(') Err('\\'') 3 [1, 3]""", """Err('{') Err('\\'') 4 [1, 3]""",
                                 """Err('{') Err('\\'') 3 [2]"""])

    @unittest.skipUnless(shutil.which("g++"), "there is no g++")
    def test_each_break_of_cpp_is_on_when_it_is_asked_for(self):
        text = switches.switched(CPP, [break_of(1, "a + b", "a - b"), break_of(2, "n * 2", "n"), break_of(3, "> 0", ">= 9")], rust=False)
        main = 'int main() { std::printf("%d %d\\n", Pair{3}.sum(1), twice(4)); }'
        self.assertEqual(self.outputs(["g++"], "a.cpp", text + main, [None, 1, 2, 3]), ["4 8", "2 8", "4 4", "4 0"])

    def test_what_cannot_be_switched_is_refused(self):
        for breaks in [
            [break_of(1, "not there", "x")],
            [break_of(1, "n: u32", "n: u64")],
            [break_of(1, "= 7", "= 8")],
            [break_of(1, "% 2 == 1", "% 2 == 0")],
            [break_of(number, "*n % 2 == 1", "true", expression=True) for number in (1, 2)],
            [break_of(1, "n + 1", "n"), break_of(2, "inner(n) /", "inner(0) /")],
        ]:
            with self.assertRaises(switches.BadBreak, msg=str(breaks)):
                switches.switched(RUST, breaks)

    def test_only_what_differs_is_looked_for(self):
        self.assertEqual(switches.difference("xx{ab}cd", "{ab}", "{}"), (3, 5, ""))
        self.assertEqual(switches.difference("aba", "aba", "abba"), (2, 2, "b"))


if __name__ == "__main__":
    unittest.main()
