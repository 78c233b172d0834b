//! The messages of Envoy's external processing and of gRPC's health check that the gateway needs, with the
//! field numbers of their definitions. Fields that are not here are skipped when they come, and never sent.
//!
//! - `envoy/service/ext_proc/v3/external_processor.proto`, `envoy/config/core/v3/base.proto`,
//!   `envoy/type/v3/http_status.proto` (Envoy, commit 0015fbd5);
//! - `google/protobuf/struct.proto`;
//! - `grpc/health/v1/health.proto` (gRPC).

use std::collections::HashMap;

use hyper::body::Bytes;

/// `envoy.service.ext_proc.v3.ProcessingRequest`, from the gateway. Without `attributes` (9).
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ProcessingRequest {
    /// What it is about.
    #[prost(oneof = "Part", tags = "2, 3, 4, 5, 6, 7")]
    pub(crate) request: Option<Part>,
    /// Metadata of the request: the subset of endpoints, and the endpoint that served.
    #[prost(message, optional, tag = "8")]
    pub(crate) metadata_context: Option<Metadata>,
    /// The gateway ignores answers.
    #[prost(bool, tag = "10")]
    pub(crate) observability_mode: bool,
    /// In the first message of a stream only.
    #[prost(message, optional, tag = "11")]
    pub(crate) protocol_config: Option<ProtocolConfiguration>,
}

/// The field `request` of a [`ProcessingRequest`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Part {
    /// The client's request begins.
    #[prost(message, tag = "2")]
    RequestHeaders(HttpHeaders),
    /// The engine's answer begins.
    #[prost(message, tag = "3")]
    ResponseHeaders(HttpHeaders),
    /// A part of the request's body, or all of it.
    #[prost(message, tag = "4")]
    RequestBody(HttpBody),
    /// A part of the answer's body, or all of it.
    #[prost(message, tag = "5")]
    ResponseBody(HttpBody),
    /// The request's trailers.
    #[prost(message, tag = "6")]
    RequestTrailers(HttpTrailers),
    /// The answer's trailers.
    #[prost(message, tag = "7")]
    ResponseTrailers(HttpTrailers),
}

/// `envoy.service.ext_proc.v3.ProtocolConfiguration`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ProtocolConfiguration {
    /// How the request's body comes: a [`BodyMode`].
    #[prost(enumeration = "BodyMode", tag = "1")]
    pub(crate) request_body_mode: i32,
    /// How the answer's body comes: a [`BodyMode`].
    #[prost(enumeration = "BodyMode", tag = "2")]
    pub(crate) response_body_mode: i32,
}

/// `envoy.extensions.filters.http.ext_proc.v3.ProcessingMode.BodySendMode` (`processing_mode.proto`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum BodyMode {
    /// No body is sent.
    None = 0,
    /// Each part as it comes, with an answer for each.
    Streamed = 1,
    /// All of it at once.
    Buffered = 2,
    /// As much as the gateway buffers.
    BufferedPartial = 3,
    /// Each part as it comes; the gateway passes on what it gets back.
    FullDuplexStreamed = 4,
    /// Messages of gRPC.
    Grpc = 5,
}

/// `envoy.service.ext_proc.v3.HttpHeaders`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HttpHeaders {
    /// The headers, pseudo-headers included.
    #[prost(message, optional, tag = "1")]
    pub(crate) headers: Option<HeaderMap>,
    /// There is no body.
    #[prost(bool, tag = "3")]
    pub(crate) end_of_stream: bool,
}

/// `envoy.service.ext_proc.v3.HttpBody`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HttpBody {
    /// The bytes.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) body: Bytes,
    /// It is the last part, and no trailers follow.
    #[prost(bool, tag = "2")]
    pub(crate) end_of_stream: bool,
}

/// `envoy.service.ext_proc.v3.HttpTrailers`, of which nothing is read.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HttpTrailers {}

/// `envoy.config.core.v3.HeaderMap`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HeaderMap {
    /// In the order in which they came.
    #[prost(message, repeated, tag = "1")]
    pub(crate) headers: Vec<HeaderValue>,
}

/// `envoy.config.core.v3.HeaderValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HeaderValue {
    /// The name, in lower case.
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    /// The value, from gateways that do not use `raw_value`.
    #[prost(string, tag = "2")]
    pub(crate) value: String,
    /// The value.
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) raw_value: Bytes,
}

/// `envoy.config.core.v3.HeaderValueOption`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HeaderValueOption {
    /// Name and value.
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<HeaderValue>,
    /// What happens to a header that is there already: [`OVERWRITE`].
    #[prost(int32, tag = "3")]
    pub(crate) append_action: i32,
}

/// `HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD`: a client cannot choose an endpoint by sending the header
/// itself.
pub(crate) const OVERWRITE: i32 = 2;

/// `envoy.config.core.v3.Metadata`. Without `typed_filter_metadata` (2).
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Metadata {
    /// By namespace.
    #[prost(map = "string, message", tag = "1")]
    pub(crate) filter_metadata: HashMap<String, Struct>,
}

/// `google.protobuf.Struct`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Struct {
    /// By name.
    #[prost(map = "string, message", tag = "1")]
    pub(crate) fields: HashMap<String, Value>,
}

/// `google.protobuf.Value`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Value {
    /// Its kind.
    #[prost(oneof = "Kind", tags = "3, 5, 6")]
    pub(crate) kind: Option<Kind>,
}

/// The field `kind` of a [`Value`]. Null (1), numbers (2) and truth values (4) are skipped.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Kind {
    /// A text.
    #[prost(string, tag = "3")]
    String(String),
    /// An object.
    #[prost(message, tag = "5")]
    Struct(Struct),
    /// A list.
    #[prost(message, tag = "6")]
    List(ListValue),
}

/// `google.protobuf.ListValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListValue {
    /// Its values.
    #[prost(message, repeated, tag = "1")]
    pub(crate) values: Vec<Value>,
}

/// `envoy.service.ext_proc.v3.ProcessingResponse`, to the gateway. Without `mode_override` (9) and
/// `override_message_timeout` (10).
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ProcessingResponse {
    /// What to do.
    #[prost(oneof = "Reply", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub(crate) response: Option<Reply>,
    /// Metadata for later filters, by namespace.
    #[prost(message, optional, tag = "8")]
    pub(crate) dynamic_metadata: Option<Struct>,
}

/// The field `response` of a [`ProcessingResponse`].
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Reply {
    /// To [`Part::RequestHeaders`].
    #[prost(message, tag = "1")]
    RequestHeaders(CommonAnswer),
    /// To [`Part::ResponseHeaders`].
    #[prost(message, tag = "2")]
    ResponseHeaders(CommonAnswer),
    /// To [`Part::RequestBody`].
    #[prost(message, tag = "3")]
    RequestBody(CommonAnswer),
    /// To [`Part::ResponseBody`].
    #[prost(message, tag = "4")]
    ResponseBody(CommonAnswer),
    /// To [`Part::RequestTrailers`].
    #[prost(message, tag = "5")]
    RequestTrailers(TrailersResponse),
    /// To [`Part::ResponseTrailers`].
    #[prost(message, tag = "6")]
    ResponseTrailers(TrailersResponse),
    /// Ends the request with an answer of the gateway's own.
    #[prost(message, tag = "7")]
    Immediate(ImmediateResponse),
}

/// `envoy.service.ext_proc.v3.HeadersResponse` and `BodyResponse`, which are alike.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CommonAnswer {
    /// What to change.
    #[prost(message, optional, tag = "1")]
    pub(crate) response: Option<CommonResponse>,
}

/// `envoy.service.ext_proc.v3.CommonResponse`; its `status` (1) is always `CONTINUE`, which is 0.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CommonResponse {
    /// Headers to set.
    #[prost(message, optional, tag = "2")]
    pub(crate) header_mutation: Option<HeaderMutation>,
    /// The body to pass on.
    #[prost(message, optional, tag = "3")]
    pub(crate) body_mutation: Option<BodyMutation>,
    /// The route has to be chosen anew, because headers have changed.
    #[prost(bool, tag = "5")]
    pub(crate) clear_route_cache: bool,
}

/// `envoy.service.ext_proc.v3.TrailersResponse`, without changes.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TrailersResponse {}

/// `envoy.service.ext_proc.v3.HeaderMutation`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HeaderMutation {
    /// Headers to set.
    #[prost(message, repeated, tag = "1")]
    pub(crate) set_headers: Vec<HeaderValueOption>,
    /// Headers to remove.
    #[prost(string, repeated, tag = "2")]
    pub(crate) remove_headers: Vec<String>,
}

/// `envoy.service.ext_proc.v3.BodyMutation`, of which only `streamed_response` is used.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct BodyMutation {
    /// A part to pass on.
    #[prost(message, optional, tag = "3")]
    pub(crate) streamed_response: Option<HttpBody>,
}

/// `envoy.service.ext_proc.v3.ImmediateResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ImmediateResponse {
    /// Its status.
    #[prost(message, optional, tag = "1")]
    pub(crate) status: Option<HttpStatus>,
    /// Its headers.
    #[prost(message, optional, tag = "2")]
    pub(crate) headers: Option<HeaderMutation>,
    /// Its body.
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) body: Bytes,
    /// For the gateway's log.
    #[prost(string, tag = "5")]
    pub(crate) details: String,
}

/// `envoy.type.v3.HttpStatus`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HttpStatus {
    /// The code.
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
}

/// `grpc.health.v1.HealthCheckRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HealthCheckRequest {
    /// The service; empty: all.
    #[prost(string, tag = "1")]
    pub(crate) service: String,
}

/// `grpc.health.v1.HealthCheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HealthCheckResponse {
    /// [`SERVING`], [`NOT_SERVING`] or, in a watch, [`SERVICE_UNKNOWN`].
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}

/// `ServingStatus.SERVING`.
pub(crate) const SERVING: i32 = 1;
/// `ServingStatus.NOT_SERVING`.
pub(crate) const NOT_SERVING: i32 = 2;
/// `ServingStatus.SERVICE_UNKNOWN`; only in a watch.
pub(crate) const SERVICE_UNKNOWN: i32 = 3;
