//! Numbers of 16 bits, as results travel.
//!
//! Rounding is to nearest, ties to even; what is not a number becomes the canonical one. The same on every machine: integer
//! operations only.

/// How the values of a result are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 8 bits of exponent, 7 of fraction: the upper half of an `f32`.
    Bf16,
    /// IEEE 754 binary16.
    Fp16,
}

impl Format {
    /// Bytes of a value.
    pub const BYTES: usize = 2;

    /// The value of these bits; exact.
    #[must_use]
    pub fn load(self, bits: u16) -> f32 {
        match self {
            Self::Bf16 => f32::from_bits(u32::from(bits) << 16),
            Self::Fp16 => from_half(bits),
        }
    }

    /// The nearest value of this format, ties to even; past the largest, infinity.
    #[must_use]
    pub fn store(self, value: f32) -> u16 {
        match self {
            Self::Bf16 => to_brain(value.to_bits()),
            Self::Fp16 => to_half(value.to_bits()),
        }
    }
}

const NAN: u32 = 0x7f80_0000;

fn to_brain(bits: u32) -> u16 {
    if bits & 0x7fff_ffff > NAN {
        return 0x7fff;
    }
    // The largest finite numbers carry into infinity, as they are to.
    half_of(bits + 0x7fff + (bits >> 16 & 1), 16)
}

fn to_half(bits: u32) -> u16 {
    let sign = half_of(bits, 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > NAN {
        return 0x7fff;
    }
    // 2^16 - 2^4 is the middle between the largest number and the next one that there would be.
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    let exponent = magnitude >> 23;
    if exponent >= 113 {
        // 2^-14 and more: rebias the exponent by 112, and round 13 bits away.
        return sign | half_of(magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1), 13);
    }
    // Multiples of 2^-24: the fraction with its leading bit, shifted. Below half of the smallest, nothing.
    let shift = 126 - exponent;
    if shift > 24 {
        return sign;
    }
    let fraction = magnitude & 0x7f_ffff | 0x80_0000;
    let odd = fraction >> shift & 1;
    sign | half_of(fraction + (1 << (shift - 1)) - 1 + odd, shift)
}

fn from_half(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let (exponent, fraction) = (u32::from(bits >> 10 & 0x1f), u32::from(bits & 0x3ff));
    let magnitude = match exponent {
        0x1f => NAN | fraction << 13,
        0 => {
            // A multiple of 2^-24: 10 bits, which f32 has exactly.
            const SMALLEST: f32 = 1.0 / 16_777_216.0;
            (f32::from(bits & 0x3ff) * SMALLEST).to_bits()
        }
        _ => (exponent + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// The lower 16 bits of `bits >> shift`.
fn half_of(bits: u32, shift: u32) -> u16 {
    let [low, high, ..] = (bits >> shift).to_le_bytes();
    u16::from_le_bytes([low, high])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the definition: sign, exponent, fraction.
    fn value(format: Format, bits: u16) -> f64 {
        let fraction_bits = if format == Format::Bf16 { 7 } else { 10 };
        let bias = if format == Format::Bf16 { 127 } else { 15 };
        let exponent = i32::from((bits & 0x7fff) >> fraction_bits);
        let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let top = if format == Format::Bf16 { 255 } else { 31 };
        match exponent {
            _ if exponent == top && fraction > 0.0 => f64::NAN,
            _ if exponent == top => sign * f64::INFINITY,
            0 => sign * fraction * 2_f64.powi(1 - bias),
            _ => sign * (1.0 + fraction) * 2_f64.powi(exponent - bias),
        }
    }

    #[test]
    fn all_numbers_are_loaded_as_defined_and_stored_again() {
        for format in [Format::Bf16, Format::Fp16] {
            for bits in 0..=u16::MAX {
                let (defined, loaded) = (value(format, bits), format.load(bits));
                if defined.is_nan() {
                    assert!(loaded.is_nan() && format.store(loaded) == 0x7fff);
                } else {
                    assert_eq!(
                        f64::from(loaded).to_bits(),
                        defined.to_bits(),
                        "{format:?} {bits:#x}"
                    );
                    assert_eq!(format.store(loaded), bits, "{format:?}");
                }
            }
        }
    }

    /// Around the middle of each two neighbours, the smallest and the largest too.
    #[test]
    fn what_lies_between_goes_to_the_nearer_and_from_the_middle_to_the_even() {
        for format in [Format::Bf16, Format::Fp16] {
            let infinity: u16 = if format == Format::Bf16 { 0x7f80 } else { 0x7c00 };
            for low in 0..infinity {
                let next = match low + 1 {
                    // As if there were one number more.
                    high if high == infinity => 2.0 * value(format, low) - value(format, low - 1),
                    high => value(format, high),
                };
                #[expect(clippy::cast_possible_truncation, reason = "has a bit more than they")]
                let middle = ((value(format, low) + next) / 2.0) as f32;
                let even = if low % 2 == 0 { low } else { low + 1 };
                for (at, stored) in
                    [(middle.next_down(), low), (middle, even), (middle.next_up(), low + 1)]
                {
                    assert_eq!(format.store(at), stored, "{format:?} {at:e} above {low:#x}");
                    assert_eq!(format.store(-at), stored | 0x8000, "{format:?} -{at:e}");
                }
            }
        }
    }
}
