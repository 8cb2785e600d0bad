//! One integration binary, so that it links once.

#[cfg(feature = "io")]
mod recorder;
#[cfg(feature = "io")]
mod sockets;
#[cfg(feature = "io")]
mod zmtp;
