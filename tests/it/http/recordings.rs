//! Parity: the sessions recorded from Dynamo 1.6.1, asked again step by step.
//!
//! Status and every field of the recorded answer must be equal. A row that differs on purpose stands in a
//! list here with our status and the reason; a listed row that does not differ fails too, so that the lists
//! stay short. Errors are compared by status, and ours must be a problem that names what Dynamo's clients read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rankwise::index::HybridRule;
use rankwise::indexer::Config;
use rankwise::load::{LoadConfig, LoadMode};
use rankwise::routing::{Policy, RouterConfig};
use rankwise::service::ServiceConfig;
use serde_json::{Value, json};

use super::harness::{Answer, Ring, Service, pack};

/// Our status, the rows, and why they differ.
type Differs = &'static [(u16, &'static [u64], &'static str)];

/// Routes that are for a later issue: unknown ones here.
const NOT_YET: [&str; 7] =
    ["/dump", "/peers", "/register_peer", "/deregister_peer", "/replica_sync", "/reopen_logs", "/test"];

/// What follows from rows that Dynamo took and we refuse.
const REFUSED_BEFORE: &str = "the registration was refused, so it is not there";

const INDEXER: Differs = &[
    (409, &[17], "R3: the endpoint is another rank's"),
    (400, &[21], "a block size of 0 is none"),
    (400, &[22], "R2: a range ends at 2^32-1, so its last rank is below it"),
    (409, &[26, 30], "text ids are taken and rank null is rank 0, but the endpoint is another rank's"),
    (400, &[32], "a pool needs a model"),
    (400, &[44, 50], "port 0 and inproc cannot be dialled"),
    (201, &[47], "R3: the port is what follows the last colon, IPv6 included"),
    (201, &[53], "`modelname` is Mooncake's word for the model"),
    (200, &[238], "I10: a name that is held says what the block is, so the second content is not held"),
    (400, &[35, 64, 105], "A1: beside `model_name`, `tenant_id` must be the group"),
    (200, &[60, 61, 62, 65], REFUSED_BEFORE),
    (404, &[66, 67, 68, 69, 72, 74, 78, 81], REFUSED_BEFORE),
    (400, &[97], "R1: a block size that differs from the pool's"),
    (200, &[98], "`model` is Mooncake's word for the model"),
    (200, &[110, 114, 115], "unsigned hashes, `seq_hashes` alone and hashes as text are taken"),
    (
        200,
        &[125, 128, 130, 133, 135, 139, 141, 377, 379],
        "I4: 1:0 announced its fourth block twice (85 and 122) and removed it once",
    ),
    (200, &[153, 173, 175, 177, 181, 183], "E1: shapes that Dynamo drops with their batch, we read"),
    (200, &[157], "R8: the connection says whose rank it is, not the payload"),
    (200, &[167], "C03: a store whose hashes and tokens do not line up is left out whole"),
    (200, &[261, 262], "I2: the last bare string of a prompt's first entry is its salt"),
    (200, &[265], "I2: an adapter without a name is a namespace of its own"),
    (200, &[267, 268, 269], "I2, I3: multimodal keys are ours, and an image is never taken for text"),
    (200, &[288, 290, 292, 294, 296], "I6: host reach is over device and host together, in any order"),
    (400, &[329], "what stands behind the object is no part of it"),
    (422, &[332], "a body is an object, not an array in the order of fields"),
    (200, &[355, 367], "`/` and `/ready` are ours"),
    (200, &[350], "A4: a prompt of 2^21 tokens passes"),
    (405, &[358], "`/workers` takes POST too"),
    (415, &[359], "`/workers` takes POST too"),
    (200, &[385], "text ids are taken, and `2` is the same worker as 2"),
    (404, &[390], "instance 2 went by its text id (385)"),
];

const SELECT: Differs = &[
    (404, &[7, 95, 173, 178], "an unknown model is 404 on every route"),
    (400, &[22, 73], "a block size of 0 is none"),
    (400, &[27, 28], "an endpoint that is none is refused when it is declared"),
    (400, &[29], "R2: a worker has at least one rank"),
    (400, &[32], "an endpoint for a rank that the worker does not declare"),
    (400, &[33], "R3: two ranks of one worker at one endpoint"),
    (201, &[40], "text ids are taken"),
    (200, &[46, 47, 49, 54], REFUSED_BEFORE),
    (404, &[53, 55], REFUSED_BEFORE),
    (404, &[60, 61], "any text may be an id, so there is just no such worker"),
    (409, &[67], "R1: the pool has another block size"),
    (201, &[68], "Eagle windows are asked for by a request, not fixed by a pool's first worker"),
    (200, &[101], "text ids are taken"),
    (400, &[104, 105, 106, 108, 263], "R5: a pin outside its worker's range is refused as such"),
    (404, &[107, 260], "a pin on a worker that is not there"),
    (200, &[109, 110], "R5: a pin without a rank is any rank of its worker"),
    (200, &[119, 120, 123, 220, 221, 224], "overrides of the credit are applied, so another rank wins"),
    (200, &[149], "`isl_tokens` says how long the prompt is, not the number of hashes"),
    (200, &[150], "unsigned hashes are taken"),
    (400, &[198, 201, 204], "a booking names its rank: a missing one is not rank 0"),
    (200, &[199], "nothing was booked at 198"),
    (404, &[200], "nothing was booked at 198"),
    (422, &[43], "a field of the wrong shape is 422 and named, the keys of a map included"),
    (404, &[289], "A4: a prompt of 2^21 tokens passes; its model is not there"),
    (200, &[83], "S5, A4: `/ready` is small and lists no workers"),
    (503, &[2, 309], "S5, A4: `/ready` is small and lists no workers"),
    (200, &[164], "I11: a query is matched in each rank's own form, whatever the request says of Eagle"),
    (200, &[291, 302], "`/` and `/metrics` are ours"),
    (415, &[296, 304], "one port for both APIs: POST `/loads` and `/query` are there"),
    (400, &[312, 315, 318], "R2: start + size past 2^32-1"),
    (503, &[313, 316, 319], "no worker is declared (312, 315, 318)"),
    (404, &[314, 317, 320], REFUSED_BEFORE),
];

#[tokio::test]
async fn the_indexers_session_is_answered_alike() {
    let mut replay = Replay::start(INDEXER).await;
    for row in rows("indexer-http.jsonl") {
        replay.step(&row).await;
    }
    replay.finish().await;
}

#[tokio::test]
async fn the_selection_sessions_are_answered_alike() {
    let mut replay = Replay::start(SELECT).await;
    for row in rows("select-http.jsonl") {
        let n = row["n"].as_u64().unwrap();
        if n >= 324 {
            // The third session is about a policy queue with a limit of 0, which we do not have.
            break;
        }
        if row.get("env").is_some() {
            replay.restart().await;
        }
        replay.step(&row).await;
    }
    replay.finish().await;
}

/// Our scores in listed rows of `/query` whose status is the recorded one.
const SCORES: &[(&[u64], &str)] = &[
    (&[125, 128], r#"{"1":{"0":16,"1":8},"2":{"0":12}}"#),
    (&[130, 133, 135, 141], r#"{"1":{"0":16,"1":8},"2":{"0":8}}"#),
    (&[139, 377, 379], r#"{"1":{"0":16},"2":{"0":8}}"#),
    (&[153, 157, 173, 175, 177, 181, 183], r#"{"2":{"0":4}}"#),
    (&[238], "{}"),
    (&[262], r#"{"20":{"0":4}}"#),
    (&[167, 261, 265, 267, 268, 269], "{}"),
];

fn rows(file: &str) -> Vec<Value> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/dynamo").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    // The first line says what the file is.
    text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect()
}

struct Replay {
    service: Service,
    differs: BTreeMap<u64, (u16, &'static str)>,
    failures: Vec<String>,
    equal: usize,
    skipped: usize,
    /// The id that we made where Dynamo made another.
    made: Option<String>,
}

impl Replay {
    async fn start(listed: Differs) -> Self {
        let rows = listed.iter().flat_map(|(status, rows, why)| rows.iter().map(|n| (*n, (*status, *why))));
        let differs: BTreeMap<_, _> = rows.collect();
        assert_eq!(
            differs.len(),
            listed.iter().map(|(_, rows, _)| rows.len()).sum::<usize>(),
            "listed twice"
        );
        Self { service: service().await, differs, failures: Vec::new(), equal: 0, skipped: 0, made: None }
    }

    async fn restart(&mut self) {
        let old = std::mem::replace(&mut self.service, service().await);
        old.stop().await;
    }

    async fn step(&mut self, row: &Value) {
        match row["step"].as_str().unwrap() {
            "event" => self.event(row),
            "replay_ring" => self.ring(row),
            "http" if row["service"] == "second" => self.skipped += 1,
            "http" => self.http(row).await,
            _ => {}
        }
    }

    fn event(&mut self, row: &Value) {
        let worker = row.get("instance_id").or_else(|| row.get("worker_id")).unwrap().to_string();
        let payload = match (row.get("payload"), row.get("payload_hex"), row.get("payload_bin_as_hex")) {
            (Some(payload), ..) => pack(payload),
            (_, Some(hex), _) => unhex(hex.as_str().unwrap()),
            (.., Some(payload)) => bin_payload(payload),
            _ => panic!("{row}"),
        };
        let (dp_rank, seq) = (row["dp_rank"].as_u64().unwrap() as u32, row["seq"].as_u64().unwrap());
        assert!(self.service.engines.send(&worker, dp_rank, seq, payload), "nobody listens: {row}");
    }

    fn ring(&mut self, row: &Value) {
        let batch = |batch: &Value| (batch["seq"].as_u64().unwrap(), pack(&batch["payload"]));
        let batches = row["batches"].as_array().unwrap().iter().map(batch).collect();
        let ring = Ring { topic_frame: row["topic_frame"] == true, batches, sent: 0 };
        self.service.engines.set_ring(row["endpoint"].as_str().unwrap(), ring);
    }

    async fn http(&mut self, row: &Value) {
        let answer = self.ask(row).await;
        let n = row["n"].as_u64().unwrap();
        let path = row["path"].as_str().unwrap();
        if NOT_YET.iter().any(|route| path.starts_with(route)) {
            self.skipped += 1;
            if answer.status != 404 {
                self.failures.push(format!("{n}: {path} is not built yet: {answer:?}"));
            }
            return;
        }
        if row["varies"].as_array().is_some_and(|fields| fields.contains(&json!("answer.selection_id"))) {
            self.made = answer.json["selection_id"].as_str().map(str::to_owned);
        }
        let difference = difference(row, &answer);
        self.align(row, &answer).await;
        match (difference, self.differs.get(&n)) {
            (None, None) => self.equal += 1,
            (Some(_), Some((status, _))) if answer.status.as_u16() == *status => {
                let pinned = SCORES.iter().find(|(rows, _)| path.starts_with("/query") && rows.contains(&n));
                if let Some((_, scores)) = pinned
                    && answer.json["scores"] != serde_json::from_str::<Value>(scores).unwrap()
                {
                    self.failures.push(format!("{n}: {} and not {scores}", answer.json["scores"]));
                }
            }
            (None, Some((_, why))) => self.failures.push(format!("{n}: listed ({why}) and does not differ")),
            (Some(difference), listed) => {
                let note = &row["note"];
                self.failures.push(format!(
                    "{n}: {} {path} {note}: {difference}; listed {listed:?}\n    body {}\n    ours {}",
                    row["method"],
                    &row["body"].to_string().chars().take(300).collect::<String>(),
                    answer.text.chars().take(700).collect::<String>(),
                ));
            }
        }
    }

    /// Undoes what a listed difference left behind, so that later rows compare the same fleet.
    async fn align(&self, row: &Value, answer: &Answer) {
        let (n, recorded) = (row["n"].as_u64().unwrap(), row["status"].as_u64().unwrap());
        let taken = recorded >= 400 && answer.status == 201;
        if taken && row["path"] == "/workers" {
            let id = row["body"]["worker_id"].as_str().unwrap();
            self.service.call("DELETE", &format!("/workers/{id}"), None).await.expect(200);
            return;
        }
        if n == 204 && row["path"] == "/reservations" {
            // A worker of one rank: ours wants the rank named.
            let mut body = row["body"].clone();
            body["dp_rank"] = json!(0);
            self.service.post("/reservations", body).await.expect(201);
            return;
        }
        let undo = match n {
            _ if taken => json!({ "instance_id": row["body"]["instance_id"] }),
            // Dynamo drops the whole instance where one rank is named.
            380 if row["path"] == "/unregister" => json!({ "instance_id": 1 }),
            _ => return,
        };
        self.service.post("/unregister", undo).await.expect(200);
    }

    async fn ask(&self, row: &Value) -> Answer {
        let body = match (row.get("body"), row.get("body_text"), row.get("body_generated")) {
            (Some(body), ..) => Some(self.adapted(row, body).to_string().into_bytes()),
            (_, Some(text), _) => Some(text.as_str().unwrap().as_bytes().to_vec()),
            (.., Some(made)) => Some(generated(row["path"].as_str().unwrap(), made)),
            _ => None,
        };
        let kind = match row.get("request_content_type") {
            Some(kind) => kind.as_str(),
            None => body.is_some().then_some("application/json"),
        };
        let path = match &self.made {
            Some(id) if row["varies"].as_array().is_some_and(|fields| fields.contains(&json!("path"))) => {
                format!("/reservations/{id}")
            }
            _ => row["path"].as_str().unwrap().to_owned(),
        };
        self.service.raw(row["method"].as_str().unwrap(), &path, kind, body).await
    }

    /// The second selection session runs without events, by an environment variable; ours is told per worker.
    fn adapted(&self, row: &Value, body: &Value) -> Value {
        let mut body = body.clone();
        if row["path"] == "/select"
            && row["candidate_costs"].is_array()
            && let Some(fields) = body.as_object_mut()
        {
            // The picked one alone is answered unless more are asked for.
            fields.insert("candidates".to_owned(), json!("all"));
        }
        let second = row["n"].as_u64().unwrap() >= 311 && row["path"] == "/workers";
        if second && let Some(fields) = body.as_object_mut() {
            fields.insert("events".to_owned(), json!("none"));
        }
        body
    }

    async fn finish(self) {
        println!("{} equal, {} listed, {} skipped", self.equal, self.differs.len(), self.skipped);
        let failed = self.failures.len();
        assert!(failed == 0, "{failed} rows differ:\n{}", self.failures.join("\n"));
        self.service.stop().await;
    }
}

async fn service() -> Service {
    // Dynamo knows a rank by what it booked there itself.
    let load = LoadConfig { mode: LoadMode::Ledger, ..LoadConfig::default() };
    let config = Config { load, ..Config::default() };
    // Dynamo looks at full-attention groups alone, and credits what events have shown.
    // Nobody is behind the endpoints of its workers.
    let policy = Policy { expect_booked: false, exclude_silent: false, ..Policy::default() };
    let router = RouterConfig { policy, hybrid: HybridRule::FullAttention, ..RouterConfig::default() };
    Service::start_with(config, router, ServiceConfig { seed: Some(1), ..ServiceConfig::default() }).await
}

/// What is unlike the recording; `None` if nothing that a client reads is.
fn difference(row: &Value, answer: &Answer) -> Option<String> {
    let status = row["status"].as_u64().unwrap();
    if u64::from(answer.status.as_u16()) != status {
        return Some(format!("status {} and not {status}", answer.status));
    }
    if status >= 400 && row["path"] != "/ready" {
        let allow = |list: &str| {
            let mut methods: Vec<_> = list.split(',').map(str::trim).map(str::to_owned).collect();
            methods.sort();
            methods
        };
        if let Some(allowed) = row["allow"].as_str()
            && allow(allowed) != allow(&answer.allow)
        {
            return Some(format!("allows {} and not {allowed}", answer.allow));
        }
        let readable = answer.json["error"].is_string() || row["method"] == "HEAD";
        return (!readable).then(|| "no error that a client can read".to_owned());
    }
    if let Some(truth) = row.get("truth_scores") {
        let scores = &answer.json["scores"];
        return (scores != truth).then(|| format!("scores {scores} and not the truth {truth}"));
    }
    if let Some(difference) = unlike_costs(row, &answer.json) {
        return Some(difference);
    }
    let mut recorded = row.get("answer")?.clone();
    if row["path"].as_str().is_some_and(|path| path.starts_with("/loads"))
        && let Some(pools) = recorded.as_array_mut()
    {
        // R7: a pool goes with its last worker; Dynamo shows it without ranks.
        pools.retain(|pool| pool["loads"].as_array().is_none_or(|ranks| !ranks.is_empty()));
    }
    let varies: Vec<&str> = row["varies"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(|field| field.strip_prefix("answer.").unwrap_or(field))
        .collect();
    unlike("", &recorded, &answer.json, &varies, row["shortened"] == true)
}

/// Every candidate's cost, where Dynamo logged it and applied what the request asked for.
fn unlike_costs(row: &Value, ours: &Value) -> Option<String> {
    const APPLIED: [&str; 3] = ["track_prefill_tokens", "assume_kv_reuse", "router_temperature"];
    let over = row["body"]["router_config_override"].as_object();
    if over.is_some_and(|over| over.keys().any(|knob| !APPLIED.contains(&knob.as_str()))) {
        return None;
    }
    let near = |a: &Value, b: &Value| a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| (a - b).abs() < 1e-3);
    if let Some(logged) = row.get("logged")
        && !near(&logged["logit"], &ours["logit"])
    {
        return Some(format!("logit {} and not {}", ours["logit"], logged["logit"]));
    }
    // A pin, by which the costs were asked for, skips the multiplier of preferred taints.
    if row["body"]["routing_constraints"]["preferred_taints"].is_object() {
        return None;
    }
    row["candidate_costs"].as_array().into_iter().flatten().find_map(|cost| {
        let same =
            |one: &&Value| (&one["worker_id"], &one["dp_rank"]) == (&cost["worker_id"], &cost["dp_rank"]);
        let Some(mine) = ours["candidates"].as_array()?.iter().find(same) else {
            // Asked about with a pin; the request itself does not let it stand.
            return None;
        };
        let fields = ["logit", "effective_prefill_tokens", "potential_decode_blocks"];
        let wrong = fields.into_iter().find(|field| !near(&mine[field], &cost[field]))?;
        Some(format!("{wrong} of candidate {cost}: {}", mine[wrong]))
    })
}

/// Fields whose keys are data: a key too many is as wrong as one too few.
const MAPS: [&str; 5] = ["scores", "instances", "dp", "endpoints", "listeners"];

fn unlike(at: &str, recorded: &Value, ours: &Value, varies: &[&str], shortened: bool) -> Option<String> {
    let differs = || Some(format!("{at}: {ours} and not {recorded}"));
    match (recorded, ours) {
        (Value::Object(recorded), Value::Object(mine)) => {
            let name = at.rsplit('.').next().unwrap_or(at);
            let is_map = MAPS.contains(&name) || at.contains(".scores.");
            if is_map && recorded.len() != mine.len() {
                return differs();
            }
            recorded
                .iter()
                .filter(|(key, _)| !varies.contains(&key.as_str()))
                .filter(|(key, _)| !(shortened && *key == "not_schedulable_reasons"))
                .find_map(|(key, value)| {
                    let path = format!("{at}.{key}");
                    match mine.get(key) {
                        Some(found) => unlike(&path, value, found, varies, shortened),
                        None => Some(format!("{path} is missing")),
                    }
                })
        }
        (Value::Array(recorded), Value::Array(mine)) => {
            if recorded.len() != mine.len() {
                return Some(format!("{at}: {} entries and not {}", mine.len(), recorded.len()));
            }
            // No list has a fixed order.
            recorded.iter().find_map(|value| {
                let mut unlikes = mine.iter().map(|found| unlike(at, value, found, varies, shortened));
                let none_alike = !unlikes.any(|unlike| unlike.is_none());
                none_alike.then(|| format!("{at}: nothing like {value}"))
            })
        }
        (Value::Number(a), Value::Number(b)) => (a.as_f64() != b.as_f64()).then(differs).flatten(),
        _ if recorded == ours => None,
        _ => differs(),
    }
}

fn generated(path: &str, made: &Value) -> Vec<u8> {
    let bytes = made["bytes"].as_u64().unwrap() as usize;
    if path == "/register" {
        let (head, tail) = ("{\"model_name\":\"", "\"}");
        return format!("{head}{}{tail}", "a".repeat(bytes - head.len() - tail.len())).into_bytes();
    }
    let (head, tail) = ("{\"token_ids\":[0", "],\"model_name\":\"m1\"}");
    let zeros = ",0".repeat((bytes - head.len() - tail.len()) / 2);
    let blanks = " ".repeat(bytes - head.len() - tail.len() - zeros.len());
    let body = format!("{head}{zeros}{blanks}{tail}").into_bytes();
    assert_eq!(body.len(), bytes);
    body
}

fn unhex(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// The one payload whose hash is a byte string: hex in the recording, bin on the wire.
fn bin_payload(payload: &Value) -> Vec<u8> {
    let text = |value: &Value| value.to_string();
    let event = &payload[1][0];
    let hash = unhex(event[1][0].as_str().unwrap());
    let marked = json!([
        payload[0],
        [[event[0], ["HASH"], event[2], event[3], event[4], event[5], event[6]]],
        payload[2]
    ]);
    let packed = pack(&marked);
    let mark = b"\xa4HASH";
    let at = packed
        .windows(mark.len())
        .position(|window| window == mark)
        .unwrap_or_else(|| panic!("{}", text(payload)));
    let mut bytes = packed[..at].to_vec();
    bytes.extend([0xc4, hash.len() as u8]);
    bytes.extend(hash);
    bytes.extend(&packed[at + mark.len()..]);
    bytes
}
