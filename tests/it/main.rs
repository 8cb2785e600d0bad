//! One integration binary, so that it links once.

#[cfg(feature = "io")]
mod interop;
#[cfg(feature = "io")]
mod peer;
#[cfg(feature = "io")]
mod recorder;
#[cfg(feature = "io")]
mod sockets;
#[cfg(feature = "io")]
mod zmtp;
