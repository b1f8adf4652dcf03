//! Bytes that tell where they belong and when they were sent.
//!
//! Every byte is a function of a seed and its place, so that stale bytes, bytes of another place and
//! bytes that were never written all show. Pure.

/// The 8 bytes at place `8 * word`.
const fn word(seed: u64, word: u64) -> u64 {
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let mixed = word.wrapping_add(seed.wrapping_mul(0xd134_2543_de82_ef95)).wrapping_mul(SPREAD);
    mixed ^ (mixed >> 29)
}

// Both loops are without iterators: where they are hardly optimised, each step of one is calls.

/// Writes the bytes of places `at..` into `bytes`. `at` is a multiple of 8.
pub fn fill(seed: u64, at: u64, bytes: &mut [u8]) {
    debug_assert!(at.is_multiple_of(8), "{at}");
    let (words, rest) = bytes.as_chunks_mut();
    let (mut index, mut number) = (0, at / 8);
    while index < words.len() {
        words[index] = word(seed, number).to_le_bytes();
        (index, number) = (index + 1, number.wrapping_add(1));
    }
    let last = word(seed, number).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// The first byte of `bytes` that is not the one of its place; places count from `at`, a multiple
/// of 8.
#[must_use]
pub fn first_wrong(seed: u64, at: u64, bytes: &[u8]) -> Option<usize> {
    debug_assert!(at.is_multiple_of(8), "{at}");
    let (words, rest) = bytes.as_chunks();
    let (mut index, mut number) = (0, at / 8);
    while index < words.len() && words[index] == word(seed, number).to_le_bytes() {
        (index, number) = (index + 1, number.wrapping_add(1));
    }
    let found = words.get(index).map_or(rest, <[u8; 8]>::as_slice);
    let wrong = found.iter().zip(word(seed, number).to_le_bytes()).position(|(&a, b)| a != b);
    Some(index * 8 + wrong?)
}

/// The numbers `0..count` in an order that `seed` decides.
#[must_use]
pub fn shuffled(seed: u64, count: u32) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..count).collect();
    let mut draw = 0;
    for last in (1..numbers.len()).rev() {
        draw += 1;
        // The bias of a remainder does not matter here.
        let other = usize::try_from(word(seed, draw) >> 8).unwrap_or(0) % (last + 1);
        numbers.swap(last, other);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_filled_is_right_and_any_other_byte_is_found() {
        for len in 0..40_usize {
            for at in [0, 8, 1 << 40] {
                let mut bytes = vec![0; len];
                fill(7, at, &mut bytes);
                assert_eq!(first_wrong(7, at, &bytes), None, "{len} {at}");
                for wrong in 0..len {
                    bytes[wrong] ^= 1;
                    assert_eq!(first_wrong(7, at, &bytes), Some(wrong), "{len} {at}");
                    bytes[wrong] ^= 1;
                }
            }
        }
    }

    #[test]
    fn parts_filled_apart_are_the_whole() {
        let (mut whole, mut parts) = ([0; 64], [0; 64]);
        fill(3, 0, &mut whole);
        for at in (0..64).step_by(16) {
            fill(3, at as u64, &mut parts[at..at + 16]);
        }
        assert_eq!(whole, parts);
    }

    #[test]
    fn another_seed_or_place_is_wrong_at_once() {
        let mut bytes = [0; 4096];
        fill(1, 0, &mut bytes);
        for (seed, at) in [(2, 0), (1, 8), (1, 4096), (0, 0)] {
            assert!(first_wrong(seed, at, &bytes) < Some(8), "{seed} {at}");
        }
        assert!(first_wrong(1, 0, &[0; 64]) < Some(8));
    }

    #[test]
    fn a_shuffle_has_every_number_once_and_another_order() {
        for count in [0, 1, 2, 3, 1000] {
            let numbers = shuffled(5, count);
            let mut sorted = numbers.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count));
            if count == 1000 {
                let in_place = numbers.iter().zip(0..).filter(|(a, b)| **a == *b).count();
                assert!(in_place < 20, "{in_place}");
                let runs =
                    numbers.windows(2).filter(|pair| pair[0].wrapping_add(1) == pair[1]).count();
                assert!(runs < 20, "{runs}");
                assert_ne!(numbers, shuffled(6, count));
            }
        }
    }
}
