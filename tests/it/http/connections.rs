//! Connections: how many, how slow, and how they end.

use std::time::{Duration, Instant};

use rankwise::indexer::Config;
use rankwise::routing::RouterConfig;
use rankwise::service::{ConnectionLimits, ServiceConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::harness::Service;

/// Nothing here takes a tenth of it; beyond, something hangs.
const PATIENCE: Duration = Duration::from_secs(30);

async fn start(connections: ConnectionLimits) -> Service {
    let service = ServiceConfig { connections, ..ServiceConfig::default() };
    Service::start_with(Config::default(), RouterConfig::default(), service).await
}

async fn connect(service: &Service) -> TcpStream {
    TcpStream::connect(service.base.strip_prefix("http://").unwrap()).await.unwrap()
}

/// Everything until the other side ends.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset is an end too.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the connection was left open");
    String::from_utf8(bytes).unwrap()
}

/// I8: who never finishes a head, and who sends nothing or nothing more, is let go.
#[tokio::test]
async fn a_head_has_a_time_limit() {
    let limits = ConnectionLimits { head_timeout: Duration::from_millis(200), ..Default::default() };
    let service = start(limits).await;
    for (sent, answered) in
        [("POST /query HT", false), ("", false), ("GET /health HTTP/1.1\r\nHost: x\r\n\r\n", true)]
    {
        let mut stream = connect(&service).await;
        stream.write_all(sent.as_bytes()).await.unwrap();
        assert_eq!(rest(&mut stream).await.starts_with("HTTP/1.1 200"), answered, "{sent:?}");
    }
    service.stop().await;
}

/// I8: there are so many connections and no more; who comes then has his turn when one ends.
#[tokio::test]
async fn connections_are_counted_and_the_next_ones_wait() {
    let service = start(ConnectionLimits { max_connections: 2, ..Default::default() }).await;
    let request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    let mut head = [0; 15];
    let mut idle = Vec::new();
    for _ in 0..2 {
        let mut stream = connect(&service).await;
        stream.write_all(request).await.unwrap();
        stream.read_exact(&mut head).await.unwrap();
        idle.push(stream);
    }
    let mut third = connect(&service).await;
    third.write_all(request).await.unwrap();
    let early = timeout(Duration::from_millis(300), third.read_exact(&mut head)).await;
    assert!(early.is_err(), "a third connection was served beside two");
    drop(idle.pop());
    timeout(PATIENCE, third.read_exact(&mut head)).await.expect("the place was not given on").unwrap();
    assert_eq!(&head, b"HTTP/1.1 200 OK");
    drop((idle, third));
    service.stop().await;
}

/// I8: a service that is to stop answers what has begun; it waits neither for watchers nor for those who have
/// begun nothing.
#[tokio::test]
async fn the_end_waits_for_answers_alone() {
    let service = start(ConnectionLimits::default()).await;
    let mut idle = connect(&service).await;
    idle.write_all(b"POST /query HT").await.unwrap();
    let mut watcher = connect(&service).await;
    watcher.write_all(b"GET /loads/watch HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut slow = connect(&service).await;
    let (body, half) = ("{\"model_name\":\"m\",\"token_ids\":[1]}", 9);
    let head = "POST /query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length:";
    slow.write_all(format!("{head} {}\r\n\r\n{}", body.len(), &body[..half]).as_bytes()).await.unwrap();
    let mut started = [0; 15];
    watcher.read_exact(&mut started).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;

    let began = Instant::now();
    let stopping = tokio::spawn(service.stop());
    assert!(rest(&mut watcher).await.ends_with("0\r\n\r\n"), "the watch was cut off");
    assert_eq!(rest(&mut idle).await, "");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    slow.write_all(&body.as_bytes()[half..]).await.unwrap();
    let answer = rest(&mut slow).await;
    assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("no indexer for model=m"), "{answer}");
    timeout(PATIENCE, stopping).await.unwrap().unwrap();
}

/// S5: a view that no longer moves is not healthy.
#[tokio::test]
async fn health_says_when_the_index_has_stopped() {
    let service = Service::start().await;
    service.get("/health").await.expect(200);
    service.engines.fail("the indexing thread panicked: planted");
    let problem = service.get("/health").await.problem(503, None);
    assert_eq!(problem["detail"], "the indexing thread panicked: planted");
    service.stop().await;
}
