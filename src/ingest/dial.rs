//! One attempt to connect a fresh socket, with the reason when it fails.

use std::io::ErrorKind;
use std::time::Duration;

use thiserror::Error;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{sleep, timeout};
use zeromq::{Socket, SocketOptions, SubSocket, ZmqError};

use crate::wire::endpoint::Target;

/// Limits of one attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialConfig {
    /// TCP connect and ZMTP handshake together may take this long: a peer that accepts and says nothing
    /// costs one attempt, not the stream.
    pub connect_timeout: Duration,
    /// An attempt that is not through after this long is checked for a refusal. `zeromq` retries refused
    /// connections silently until its time is up, so a dead port looks like a mute peer from outside.
    pub check_refusal_after: Duration,
}

impl Default for DialConfig {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(1), check_refusal_after: Duration::from_millis(100) }
    }
}

impl DialConfig {
    /// Options of a new socket that keep the time limit.
    pub(super) fn socket_options(&self) -> SocketOptions {
        let mut options = SocketOptions::default();
        options.connect_timeout(self.connect_timeout);
        options
    }
}

/// Why an attempt failed.
#[derive(Debug, Error)]
pub(super) enum DialError {
    /// Nobody listens there.
    #[error("nobody listens")]
    Refused,
    /// No handshake in time.
    #[error("no handshake in time")]
    TimedOut,
    /// The peer speaks something else, or cannot be reached.
    #[error(transparent)]
    Failed(#[from] ZmqError),
}

/// Connects `socket`, which was made with [`DialConfig::socket_options`].
pub(super) async fn dial<S: Socket>(
    socket: &mut S,
    target: &Target,
    config: &DialConfig,
) -> Result<(), DialError> {
    let endpoint = target.to_string();
    let mut connecting = socket.connect(&endpoint);
    let first = tokio::select! {
        biased;
        result = &mut connecting => Some(result),
        () = sleep(config.check_refusal_after) => None,
    };
    let result = match first {
        Some(result) => result,
        None if is_refused(target, config.connect_timeout).await => return Err(DialError::Refused),
        None => connecting.await,
    };
    result.map_err(|error| match error {
        ZmqError::ConnectTimeout(_) => DialError::TimedOut,
        ZmqError::Network(error) if error.kind() == ErrorKind::ConnectionRefused => DialError::Refused,
        error => DialError::Failed(error),
    })
}

/// Whether somebody at `target` shakes hands with a subscriber. The connection is dropped at once.
pub(super) async fn shakes_hands(target: &Target, config: &DialConfig) -> bool {
    let mut socket = SubSocket::with_options(config.socket_options());
    dial(&mut socket, target, config).await.is_ok()
}

/// Whether nobody listens at `target`: a plain connection is tried and dropped.
async fn is_refused(target: &Target, limit: Duration) -> bool {
    let outcome = match target {
        Target::Tcp { host, port } => {
            let connecting = TcpStream::connect((host.as_str(), *port));
            match timeout(limit, connecting).await {
                // A dial to a free local port can meet itself: then nobody listens either.
                Ok(Ok(stream)) => return is_own_reflection(&stream),
                Ok(Err(error)) => error,
                Err(_) => return false,
            }
        }
        Target::Ipc(path) => match timeout(limit, UnixStream::connect(path)).await {
            Ok(Err(error)) => error,
            _ => return false,
        },
    };
    match outcome.kind() {
        ErrorKind::ConnectionRefused => true,
        ErrorKind::NotFound => matches!(target, Target::Ipc(_)),
        _ => false,
    }
}

fn is_own_reflection(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}
