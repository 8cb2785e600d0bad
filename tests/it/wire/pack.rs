//! A msgpack writer that can also write what no engine would: odd widths, bad text, extensions.

/// One msgpack value, with its way of writing where there is a choice.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Nil,
    Bool(bool),
    /// The shortest unsigned form.
    UInt(u64),
    /// The shortest signed form, also for non-negative numbers.
    Int(i64),
    /// Eight bytes, unsigned.
    WideUInt(u64),
    F32(f32),
    F64(f64),
    /// May hold bytes that are not UTF-8.
    Str(Vec<u8>),
    Bin(Vec<u8>),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
    Ext(i8, Vec<u8>),
}

impl Value {
    pub fn pack(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Self::Nil => out.push(0xc0),
            Self::Bool(value) => out.push(0xc2 + u8::from(*value)),
            Self::UInt(value) => write_uint(*value, out),
            Self::Int(value) => write_int(*value, out),
            Self::WideUInt(value) => {
                out.push(0xcf);
                out.extend(value.to_be_bytes());
            }
            Self::F32(value) => {
                out.push(0xca);
                out.extend(value.to_be_bytes());
            }
            Self::F64(value) => {
                out.push(0xcb);
                out.extend(value.to_be_bytes());
            }
            Self::Str(bytes) => {
                write_len(bytes.len(), Some((0xa0, 32)), Some(0xd9), 0xda, out);
                out.extend(bytes);
            }
            Self::Bin(bytes) => {
                write_len(bytes.len(), None, Some(0xc4), 0xc5, out);
                out.extend(bytes);
            }
            Self::Array(values) => {
                write_len(values.len(), Some((0x90, 16)), None, 0xdc, out);
                values.iter().for_each(|value| value.write(out));
            }
            Self::Map(entries) => {
                write_len(entries.len(), Some((0x80, 16)), None, 0xde, out);
                for (key, value) in entries {
                    key.write(out);
                    value.write(out);
                }
            }
            Self::Ext(kind, bytes) => write_ext(*kind, bytes, out),
        }
    }
}

fn write_uint(value: u64, out: &mut Vec<u8>) {
    match value {
        0..=0x7f => out.push(value as u8),
        0x80..=0xff => out.extend([0xcc, value as u8]),
        0x100..=0xffff => {
            out.push(0xcd);
            out.extend((value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            out.push(0xce);
            out.extend((value as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend(value.to_be_bytes());
        }
    }
}

fn write_int(value: i64, out: &mut Vec<u8>) {
    if (-32..0).contains(&value) {
        out.push(value as u8);
    } else if let Ok(value) = i8::try_from(value) {
        out.extend([0xd0, value as u8]);
    } else if let Ok(value) = i16::try_from(value) {
        out.push(0xd1);
        out.extend(value.to_be_bytes());
    } else if let Ok(value) = i32::try_from(value) {
        out.push(0xd2);
        out.extend(value.to_be_bytes());
    } else {
        out.push(0xd3);
        out.extend(value.to_be_bytes());
    }
}

/// The marker and length: within the marker up to `fixed.1`, then 1 (where there is such a form), 2, 4 bytes.
fn write_len(len: usize, fixed: Option<(u8, usize)>, one: Option<u8>, two: u8, out: &mut Vec<u8>) {
    match (fixed, one) {
        (Some((marker, below)), _) if len < below => out.push(marker | len as u8),
        (_, Some(marker)) if len < 0x100 => out.extend([marker, len as u8]),
        _ if len < 0x1_0000 => {
            out.push(two);
            out.extend((len as u16).to_be_bytes());
        }
        _ => {
            out.push(two + 1);
            out.extend((len as u32).to_be_bytes());
        }
    }
}

fn write_ext(kind: i8, bytes: &[u8], out: &mut Vec<u8>) {
    match bytes.len() {
        1 => out.push(0xd4),
        2 => out.push(0xd5),
        4 => out.push(0xd6),
        8 => out.push(0xd7),
        16 => out.push(0xd8),
        len => out.extend([0xc7, len as u8]),
    }
    out.push(kind as u8);
    out.extend(bytes);
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        u64::try_from(value).map_or(Self::Int(value), Self::UInt)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::F64(value)
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(values: Vec<T>) -> Self {
        Self::Array(values.into_iter().map(Into::into).collect())
    }
}

/// Values by JSON notation: `pack!([1.5, [["BlockStored", [1], null]], 0])`. Byte strings are `(bin b"…")`.
macro_rules! value {
    (null) => { $crate::wire::pack::Value::Nil };
    ([ $($inner:tt),* $(,)? ]) => { $crate::wire::pack::Value::Array(vec![ $( $crate::wire::pack::value!($inner) ),* ]) };
    ({ $($key:tt : $inner:tt),* $(,)? }) => {
        $crate::wire::pack::Value::Map(vec![ $( ($crate::wire::pack::value!($key), $crate::wire::pack::value!($inner)) ),* ])
    };
    ($other:expr) => { $crate::wire::pack::Value::from($other) };
}
pub(crate) use value;
