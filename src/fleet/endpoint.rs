//! Endpoints: one per rank, never shared.
//!
//! Two spellings of one address must collide when they are declared, because at run time they would not: two
//! subscriptions to one publisher work, and every event is then counted for two ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

use crate::ids::DpRank;

/// Longest endpoint: a DNS name has at most 253 bytes and a socket path 107, so anything longer is no address.
const MAX_LEN: usize = 300;

/// An address of one rank's socket, in one spelling.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    address: String,
    place: Place,
}

/// Where an endpoint really is: what two endpoints are compared by.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) enum Place {
    /// A port that we bind, on all interfaces: whichever wildcard was written, the port can be bound once.
    Bound(u16),
    /// A host and port that we connect to.
    Dialled(String, u16),
    /// A socket path that we connect to.
    Path(PathBuf),
}

impl Endpoint {
    /// Reads one rank's own endpoint.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn parse(text: &str) -> Result<Self, EndpointError> {
        Ok(match Base::parse(text)? {
            Base::Tcp { host, port } => Self::tcp(&host, port),
            Base::Ipc(path) => Self::ipc(path),
        })
    }

    /// The address to connect to or to bind, as a socket library takes it (`*` is written out).
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether the address is a wildcard: then we bind it and the engine connects to us.
    pub fn binds(&self) -> bool {
        matches!(self.place, Place::Bound(_))
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }

    fn tcp(host: &Host, port: u16) -> Self {
        let place = match host {
            Host::Any(_) => Place::Bound(port),
            Host::Addr(addr) => Place::Dialled(addr.to_string(), port),
            // One socket under two names on practically every machine.
            Host::Name(name) if name == "localhost" => Place::Dialled(Ipv4Addr::LOCALHOST.to_string(), port),
            Host::Name(name) => Place::Dialled(name.clone(), port),
        };
        Self { address: format!("tcp://{host}:{port}"), place }
    }

    fn ipc(path: String) -> Self {
        // Repeated slashes and `.` do not make another file.
        let place = Place::Path(Path::new(&path).components().collect());
        Self { address: format!("ipc://{path}"), place }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What is wrong with an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Neither `tcp://` nor `ipc://`.
    #[error("not an endpoint: write tcp://HOST:PORT or ipc://PATH")]
    Scheme,
    /// `inproc://` lives within the engine's own process.
    #[error("inproc cannot be reached from another process: let the engine publish on tcp or ipc")]
    Inproc,
    /// Nothing that can be a host name or an address.
    #[error("the host is missing or malformed: write a name, an IPv4 address or an IPv6 address in brackets")]
    Host,
    /// What follows the last colon is no port.
    #[error("what follows the last colon is not a port from 1 to 65535")]
    Port,
    /// Port 0.
    #[error("port 0 lets the engine's system choose: give the port that it chose")]
    PortZero,
    /// A wildcard where an engine binds, whatever it is told.
    #[error(
        "an engine always binds its replay socket, so a wildcard says nothing: write the host to connect to"
    )]
    ReplayWildcard,
    /// An empty or wildcard socket path.
    #[error("the socket path is missing: write ipc://PATH")]
    Path,
    /// More than 300 bytes.
    #[error("longer than any address can be (300 bytes)")]
    TooLong,
}

/// The endpoints of a worker's ranks: a base from which each rank's follows, and ranks with their own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Endpoints {
    /// The address of global rank 0: every other rank adds its **global** number to the port, or `_dpN` to
    /// an `ipc` path.
    pub base: Option<String>,
    /// Ranks with an address of their own, which wins and is taken as it stands.
    pub per_rank: BTreeMap<DpRank, String>,
}

impl Endpoints {
    /// Every rank's address follows from `base`.
    pub fn base(base: impl Into<String>) -> Self {
        Self { base: Some(base.into()), per_rank: BTreeMap::new() }
    }

    /// Every rank has its own address.
    pub fn per_rank<S: Into<String>>(endpoints: impl IntoIterator<Item = (DpRank, S)>) -> Self {
        Self { base: None, per_rank: endpoints.into_iter().map(|(rank, at)| (rank, at.into())).collect() }
    }

    /// The endpoint of the **global** rank `rank`; `None` where nothing was given for it.
    ///
    /// # Errors
    ///
    /// An address that cannot be used, a base port plus the rank that is no port among them.
    pub fn endpoint(&self, rank: DpRank) -> Result<Option<Endpoint>, EndpointError> {
        Resolver::new(self).and_then(|resolver| resolver.at(rank)).map_err(|unresolved| match unresolved {
            Unresolved::Bad(_, why) => why,
            Unresolved::PastEnd(..) => EndpointError::Port,
        })
    }
}

/// Why a rank has no endpoint.
pub(crate) enum Unresolved {
    /// This address cannot be used.
    Bad(String, EndpointError),
    /// This base port plus the rank is no port.
    PastEnd(String, u16),
}

/// [`Endpoints`] whose base has been read once.
pub(crate) struct Resolver<'a> {
    endpoints: &'a Endpoints,
    base: Option<Base>,
}

impl<'a> Resolver<'a> {
    pub(crate) fn new(endpoints: &'a Endpoints) -> Result<Self, Unresolved> {
        let base = match &endpoints.base {
            Some(text) => Some(Base::parse(text).map_err(|why| bad(text, why))?),
            None => None,
        };
        Ok(Self { endpoints, base })
    }

    /// The endpoint of `rank`; `None` where nothing was declared for it.
    pub(crate) fn at(&self, rank: DpRank) -> Result<Option<Endpoint>, Unresolved> {
        if let Some(own) = self.endpoints.per_rank.get(&rank) {
            return Endpoint::parse(own).map(Some).map_err(|why| bad(own, why));
        }
        match &self.base {
            None => Ok(None),
            Some(Base::Ipc(path)) if rank.0 == 0 => Ok(Some(Endpoint::ipc(path.clone()))),
            Some(Base::Ipc(path)) => Ok(Some(Endpoint::ipc(format!("{path}_dp{rank}")))),
            Some(Base::Tcp { host, port }) => {
                let sum = u64::from(*port) + u64::from(rank.0);
                match u16::try_from(sum) {
                    Ok(port) => Ok(Some(Endpoint::tcp(host, port))),
                    Err(_) => Err(Unresolved::PastEnd(format!("tcp://{host}:{port}"), *port)),
                }
            }
        }
    }
}

fn bad(text: &str, why: EndpointError) -> Unresolved {
    // An error must not carry a whole hostile body around.
    Unresolved::Bad(text.chars().take(MAX_LEN).collect(), why)
}

/// An endpoint taken apart.
enum Base {
    Tcp { host: Host, port: u16 },
    Ipc(String),
}

impl Base {
    fn parse(text: &str) -> Result<Self, EndpointError> {
        if text.len() > MAX_LEN {
            return Err(EndpointError::TooLong);
        }
        let (scheme, rest) = text.trim().split_once("://").ok_or(EndpointError::Scheme)?;
        match scheme.to_ascii_lowercase().as_str() {
            "tcp" => {
                let (host, port) = rest.rsplit_once(':').ok_or(EndpointError::Port)?;
                let port = parse_port(port)?;
                Ok(Self::Tcp { host: Host::parse(host).ok_or(EndpointError::Host)?, port })
            }
            "ipc" if rest.is_empty() || rest == "*" || rest.contains('\0') => Err(EndpointError::Path),
            "ipc" => Ok(Self::Ipc(rest.to_owned())),
            "inproc" => Err(EndpointError::Inproc),
            _ => Err(EndpointError::Scheme),
        }
    }
}

fn parse_port(text: &str) -> Result<u16, EndpointError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(EndpointError::Port);
    }
    match text.parse() {
        Ok(0) => Err(EndpointError::PortZero),
        Ok(port) => Ok(port),
        Err(_) => Err(EndpointError::Port),
    }
}

/// A host in one spelling.
enum Host {
    /// All interfaces: ours to bind.
    Any(IpAddr),
    Addr(IpAddr),
    Name(String),
}

impl Host {
    fn parse(text: &str) -> Option<Self> {
        if text == "*" {
            return Some(Self::Any(Ipv4Addr::UNSPECIFIED.into()));
        }
        let addr = match text.strip_prefix('[') {
            Some(inner) => Some(inner.strip_suffix(']')?.parse::<Ipv6Addr>().ok()?.to_canonical()),
            None => text.parse::<IpAddr>().ok().map(|addr| addr.to_canonical()),
        };
        match addr {
            Some(addr) if addr.is_unspecified() => Some(Self::Any(addr)),
            Some(addr) => Some(Self::Addr(addr)),
            None => Self::name(text),
        }
    }

    fn name(text: &str) -> Option<Self> {
        let name = text.strip_suffix('.').unwrap_or(text);
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
        (!name.is_empty() && name.bytes().all(fits)).then(|| Self::Name(name.to_ascii_lowercase()))
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any(IpAddr::V6(addr)) | Self::Addr(IpAddr::V6(addr)) => write!(f, "[{addr}]"),
            Self::Any(addr) | Self::Addr(addr) => addr.fmt(f),
            Self::Name(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic)]
    use super::*;

    fn at(base: &str, rank: u32) -> Result<String, u16> {
        let endpoints = Endpoints::base(base);
        let Ok(resolver) = Resolver::new(&endpoints) else { panic!("{base}") };
        match resolver.at(DpRank(rank)) {
            Ok(endpoint) => Ok(endpoint.unwrap().to_string()),
            Err(Unresolved::PastEnd(_, port)) => Err(port),
            Err(Unresolved::Bad(text, why)) => panic!("{text}: {why}"),
        }
    }

    /// R3, C06
    #[test]
    fn the_global_rank_is_added_to_what_follows_the_last_colon() {
        assert_eq!(at("tcp://10.0.0.2:5557", 4).unwrap(), "tcp://10.0.0.2:5561");
        assert_eq!(at("tcp://[::1]:5557", 3).unwrap(), "tcp://[::1]:5560");
        assert_eq!(at("tcp://[fe80::5557]:1", 1).unwrap(), "tcp://[fe80::5557]:2");
        assert_eq!(at("tcp://engine-0.svc:5557", 0).unwrap(), "tcp://engine-0.svc:5557");
    }

    /// R3
    #[test]
    fn a_port_past_the_last_one_is_refused() {
        assert_eq!(at("tcp://h:65535", 0).unwrap(), "tcp://h:65535");
        assert_eq!(at("tcp://h:65535", 1), Err(65535));
        assert_eq!(at("tcp://h:5557", u32::MAX - 1), Err(5557));
    }

    /// R3
    #[test]
    fn ipc_gets_a_suffix_above_rank_zero() {
        assert_eq!(at("ipc:///run/kv", 0).unwrap(), "ipc:///run/kv");
        assert_eq!(at("ipc:///run/kv", 1).unwrap(), "ipc:///run/kv_dp1");
        assert_eq!(at("ipc:///run/kv", 12).unwrap(), "ipc:///run/kv_dp12");
    }

    /// R3
    #[test]
    fn what_is_no_endpoint_is_refused_with_its_reason() {
        use EndpointError::*;
        for (text, why) in [
            ("", Scheme),
            ("10.0.0.1:5557", Scheme),
            ("udp://10.0.0.1:5557", Scheme),
            ("inproc://kv", Inproc),
            ("INPROC://kv", Inproc),
            ("tcp://10.0.0.1", Port),
            ("tcp://10.0.0.1:", Port),
            ("tcp://10.0.0.1:+5", Port),
            ("tcp://10.0.0.1:5557/", Port),
            ("tcp://10.0.0.1:65536", Port),
            ("tcp://10.0.0.1:99999999999999999999", Port),
            ("tcp://10.0.0.1:0", PortZero),
            ("tcp://*:0", PortZero),
            ("tcp://:5557", Host),
            ("tcp://[::1:5557", Host),
            ("tcp://[10.0.0.1]:5557", Host),
            ("tcp://a b:5557", Host),
            ("tcp://user@host:5557", Host),
            ("tcp://h\u{f6}st:5557", Host),
            ("ipc://", Path),
            ("ipc://*", Path),
        ] {
            assert_eq!(Endpoint::parse(text).unwrap_err(), why, "{text}");
        }
        assert_eq!(Endpoint::parse(&format!("tcp://{}:1", "a".repeat(300))).unwrap_err(), TooLong);
    }

    /// R3: two spellings of one address are one place.
    #[test]
    fn spellings_of_one_address_meet() {
        for (one, other) in [
            ("tcp://Engine-0:5557", "TCP://engine-0:5557"),
            ("tcp://engine-0.:5557", "tcp://engine-0:5557"),
            ("tcp://[::1]:5557", "tcp://[0:0:0:0:0:0:0:1]:05557"),
            ("tcp://::1:5557", "tcp://[::1]:5557"),
            ("tcp://[::ffff:10.0.0.1]:5557", "tcp://10.0.0.1:5557"),
            ("tcp://localhost:5557", "tcp://127.0.0.1:5557"),
            ("tcp://*:5557", "tcp://0.0.0.0:5557"),
            ("tcp://*:5557", "tcp://[::]:5557"),
            ("ipc:///run/kv", "ipc:///run//./kv"),
        ] {
            let (one, other) = (Endpoint::parse(one).unwrap(), Endpoint::parse(other).unwrap());
            assert_eq!(one.place(), other.place(), "{one} {other}");
        }
        let place = |text| Endpoint::parse(text).unwrap().place;
        assert_ne!(place("tcp://10.0.0.1:5557"), place("tcp://10.0.0.2:5557"));
        assert_ne!(place("tcp://*:5557"), place("tcp://*:5558"));
        assert_ne!(place("ipc:///run/KV"), place("ipc:///run/kv"));
    }

    /// A wildcard is ours to bind, and is written as socket libraries take it.
    #[test]
    fn wildcards_bind() {
        for (text, address) in [
            ("tcp://*:5557", "tcp://0.0.0.0:5557"),
            ("tcp://0.0.0.0:5557", "tcp://0.0.0.0:5557"),
            ("tcp://[::]:5557", "tcp://[::]:5557"),
        ] {
            let endpoint = Endpoint::parse(text).unwrap();
            assert!(endpoint.binds());
            assert_eq!(endpoint.address(), address);
        }
        assert!(!Endpoint::parse("tcp://127.0.0.1:5557").unwrap().binds());
        assert!(!Endpoint::parse("ipc:///run/kv").unwrap().binds());
    }

    /// R3
    #[test]
    fn an_own_endpoint_wins_over_the_base() {
        let mut endpoints = Endpoints::base("tcp://h:5557");
        endpoints.per_rank.insert(DpRank(1), "tcp://h:7000".into());
        let Ok(resolver) = Resolver::new(&endpoints) else { panic!() };
        let at = |rank| resolver.at(DpRank(rank)).ok().flatten().unwrap().to_string();
        assert_eq!([at(0), at(1), at(2)], ["tcp://h:5557", "tcp://h:7000", "tcp://h:5559"]);
    }
}
