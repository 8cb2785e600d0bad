//! Which fields of a request nobody reads.
//!
//! serde tells a deserializer the names that every struct knows. So one wrapper around the real deserializer
//! sees every name that is not known, at every depth and of every body, and no route keeps a list. Values whose
//! shape is not declared (`serde_json::Value`, tagged and untagged enums) are not looked into: see
//! [`Strays::look_into`] for those.

use std::borrow::Cow;
use std::fmt;

use serde::de::value::CowStrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};

/// What was met that no field is called.
#[derive(Debug, Default)]
pub(super) struct Strays {
    /// Where we are: the known fields above.
    path: Vec<&'static str>,
    /// Unknown ones that look like no known one, by their path; at most [`MAX_NAMED`].
    pub(super) foreign: Vec<String>,
    /// The first that looks like a known one.
    pub(super) misspelt: Option<Misspelt>,
}

/// A field that nobody reads, and the one that was meant.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Misspelt {
    pub(super) path: String,
    pub(super) meant: &'static str,
}

/// Names that one answer repeats: a client that grew sends a handful, and a hostile one may send thousands.
const MAX_NAMED: usize = 16;

/// Bytes of a name that is repeated; our longest has 28.
const MAX_NAME: usize = 64;

/// Shorter names have so many neighbours that nearness says nothing.
const MIN_LETTERS: usize = 5;

/// Names of the engines' own requests that are near one of ours and mean something else.
const NOT_OURS: [&str; 2] = ["top_p", "top_a"];

impl Strays {
    /// Looks for unknown names in an object whose shape serde was not told.
    pub(super) fn look_into<'k>(
        &mut self,
        at: &'static str,
        keys: impl Iterator<Item = &'k String>,
        known: &[&'static str],
    ) {
        self.path.push(at);
        for key in keys.filter(|key| !known.contains(&key.as_str())) {
            self.meet(key, known);
        }
        self.path.pop();
    }

    fn meet(&mut self, key: &str, known: &[&'static str]) {
        if let Some(meant) = nearest(key, known) {
            let path = self.path_of(key);
            self.misspelt.get_or_insert(Misspelt { path, meant });
        } else if self.foreign.len() < MAX_NAMED {
            let path = self.path_of(key);
            if !self.foreign.contains(&path) {
                self.foreign.push(path);
            }
        }
    }

    fn path_of(&self, key: &str) -> String {
        let key: Cow<'_, str> = match key.char_indices().nth(MAX_NAME) {
            Some((end, _)) => format!("{}…", &key[..end]).into(),
            None => key.into(),
        };
        let above = self.path.iter().map(|name| format!("{name}."));
        above.chain([key.into_owned()]).collect()
    }
}

/// The known name that a misspelt one means: at most two letters are wrong, missing, too many or swapped.
fn nearest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    let letters = key.chars().count();
    // The upper bound keeps a hostile name of megabytes from being compared.
    if !(MIN_LETTERS..=MAX_NAME).contains(&letters) || NOT_OURS.contains(&key) {
        return None;
    }
    let near = |name: &&'static str| {
        // Two edits make any short word of any other.
        let allowed = if name.len() < MIN_LETTERS { 1 } else { 2 };
        let edits = strsim::damerau_levenshtein(key, name);
        (edits <= allowed).then_some((edits, *name))
    };
    known.iter().filter_map(near).min_by_key(|(edits, _)| *edits).map(|(_, name)| name)
}

/// A deserializer that tells `strays` of every name that is not known. Costs a comparison with the known names
/// per key of a struct, and nothing per element of a list.
pub(super) struct Watched<'s, D> {
    inner: D,
    strays: &'s mut Strays,
}

impl<'s, D> Watched<'s, D> {
    pub(super) fn new(inner: D, strays: &'s mut Strays) -> Self {
        Self { inner, strays }
    }
}

/// Has no structs inside: the real deserializer's own business.
macro_rules! as_it_is {
    ($($method:ident)*) => {$(
        #[inline]
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method(visitor)
        }
    )*};
}

/// May have structs inside.
macro_rules! looked_into {
    ($($method:ident($($arg:ident: $of:ty),*))*) => {$(
        #[inline]
        fn $method<V: Visitor<'de>>(self, $($arg: $of,)* visitor: V) -> Result<V::Value, D::Error> {
            self.inner.$method($($arg,)* Inside { visitor, strays: self.strays, known: None })
        }
    )*};
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Watched<'_, D> {
    type Error = D::Error;

    as_it_is! {
        deserialize_any deserialize_bool deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64
        deserialize_i128 deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 deserialize_u128
        deserialize_f32 deserialize_f64 deserialize_char deserialize_str deserialize_string deserialize_bytes
        deserialize_byte_buf deserialize_unit deserialize_identifier deserialize_ignored_any
    }

    looked_into! {
        deserialize_option()
        deserialize_seq()
        deserialize_map()
        deserialize_tuple(len: usize)
        deserialize_newtype_struct(name: &'static str)
        deserialize_tuple_struct(name: &'static str, len: usize)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_unit_struct(name, visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let inside = Inside { visitor, strays: self.strays, known: Some(fields) };
        self.inner.deserialize_struct(name, fields, inside)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.inner.deserialize_enum(name, variants, visitor)
    }

    fn is_human_readable(&self) -> bool {
        self.inner.is_human_readable()
    }
}

/// Passes on what the real deserializer finds, and hands out watched ones for what is inside. The same wrapper
/// serves as visitor, seed and access: each is the real one with `strays` beside it.
struct Inside<'s, T> {
    visitor: T,
    strays: &'s mut Strays,
    /// The names of the struct that is read; `None` where keys are data.
    known: Option<&'static [&'static str]>,
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Inside<'_, V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.visitor.expecting(f)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_unit()
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.visitor.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_some(Watched { inner, strays: self.strays })
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.visitor.visit_newtype_struct(Watched { inner, strays: self.strays })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        self.visitor.visit_seq(Elements { inner, strays: self.strays })
    }

    fn visit_map<A: MapAccess<'de>>(self, inner: A) -> Result<V::Value, A::Error> {
        let Self { visitor, strays, known } = self;
        visitor.visit_map(Entries { inner, strays, known, at: None })
    }
}

struct Seed<'s, S> {
    seed: S,
    strays: &'s mut Strays,
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Seed<'_, S> {
    type Value = S::Value;

    #[inline]
    fn deserialize<D: Deserializer<'de>>(self, inner: D) -> Result<S::Value, D::Error> {
        self.seed.deserialize(Watched { inner, strays: self.strays })
    }
}

struct Elements<'s, A> {
    inner: A,
    strays: &'s mut Strays,
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Elements<'_, A> {
    type Error = A::Error;

    #[inline]
    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.inner.next_element_seed(Seed { seed, strays: self.strays })
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

struct Entries<'s, A> {
    inner: A,
    strays: &'s mut Strays,
    known: Option<&'static [&'static str]>,
    /// The known field whose value comes next.
    at: Option<&'static str>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Entries<'_, A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        let Some(known) = self.known else { return self.inner.next_key_seed(seed) };
        let Some(key) = self.inner.next_key_seed(Key)? else { return Ok(None) };
        self.at = known.iter().find(|name| **name == key).copied();
        if self.at.is_none() {
            self.strays.meet(&key, known);
        }
        let key: CowStrDeserializer<'de, A::Error> = key.into_deserializer();
        seed.deserialize(key).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        let Some(at) = self.at.take() else {
            return self.inner.next_value_seed(Seed { seed, strays: self.strays });
        };
        self.strays.path.push(at);
        let value = self.inner.next_value_seed(Seed { seed, strays: self.strays });
        self.strays.path.pop();
        value
    }

    fn size_hint(&self) -> Option<usize> {
        self.inner.size_hint()
    }
}

/// A key, borrowed from the body where it stands there without escapes.
struct Key;

impl<'de> DeserializeSeed<'de> for Key {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Cow<'de, str>, D::Error> {
        from.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Key {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field's name")
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, key: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(key))
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(key.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize, Debug, PartialEq, Default)]
    #[serde(default)]
    struct Outer {
        data_parallel_size: Option<u32>,
        mm: Vec<Inner>,
        by_rank: BTreeMap<u32, Inner>,
        pinned_worker: Option<Inner>,
        top_k: Option<u32>,
    }

    #[derive(Deserialize, Debug, PartialEq, Default)]
    #[serde(default)]
    struct Inner {
        offset: u64,
    }

    fn read(text: &str) -> (Outer, Strays) {
        let mut strays = Strays::default();
        let mut json = serde_json::Deserializer::from_str(text);
        let value = Outer::deserialize(Watched::new(&mut json, &mut strays)).unwrap();
        assert_eq!(value, serde_json::from_str(text).unwrap(), "watching changes nothing");
        (value, strays)
    }

    fn meant(text: &str) -> Option<(String, &'static str)> {
        read(text).1.misspelt.map(|misspelt| (misspelt.path, misspelt.meant))
    }

    /// A1: two letters may be wrong, at every depth; the path says where.
    #[test]
    fn a_near_name_is_a_misspelt_one() {
        let is = |path: &str, name| Some((path.to_owned(), name));
        assert_eq!(meant(r#"{"data_parallel_siez": 2}"#), is("data_parallel_siez", "data_parallel_size"));
        assert_eq!(meant(r#"{"data_paralel_sze": 2}"#), is("data_paralel_sze", "data_parallel_size"));
        assert_eq!(meant(r#"{"mm": [{}, {"ofset": 1}]}"#), is("mm.ofset", "offset"));
        assert_eq!(meant(r#"{"by_rank": {"4": {"offste": 1}}}"#), is("by_rank.offste", "offset"));
        assert_eq!(meant(r#"{"pinned_worker": {"offsets": 1}}"#), is("pinned_worker.offsets", "offset"));
        assert_eq!(meant(r#"{"pined_wroker": {}}"#), is("pined_wroker", "pinned_worker"));
        assert_eq!(meant(r#"{"pinned\u005fworkr": {}}"#), is("pinned_workr", "pinned_worker"));
    }

    /// A1: what is near nothing, too short, or known to be somebody else's is foreign and named once.
    #[test]
    fn a_far_name_is_a_foreign_one() {
        let (_, strays) =
            read(r#"{"mn": 1, "stream": {"offste": 1}, "top_p": 0.5, "mm": [{"x": 1}, {"x": 2}]}"#);
        assert_eq!(strays.misspelt, None);
        assert_eq!(strays.foreign, ["mn", "stream", "top_p", "mm.x"]);
    }

    /// A1: a hostile body names no more than it may.
    #[test]
    fn what_is_named_is_bounded() {
        let many: Vec<String> = (0..1_000).map(|n| format!("\"{}{n}\": 1", "x".repeat(500))).collect();
        let (_, strays) = read(&format!("{{{}}}", many.join(",")));
        assert!(strays.foreign.len() <= MAX_NAMED && strays.foreign[0].chars().count() <= MAX_NAME + 1);
    }
}
