package main

import (
	"encoding/json"
	"net/http"
)

// apiError is an answer that says what is wrong, in OpenAI's form.
type apiError struct {
	status     int
	kind       string // OpenAI's type
	code       string
	message    string
	param      string // field of the request that is wrong
	reason     string // the conductor's, for a rejection
	stage      string // where it rejected
	retryAfter string

	relayed *answer // what an engine has said, in place of all this
}

// answer is an engine's own.
type answer struct {
	status      int
	contentType string
	body        []byte
}

// Error implements error.
func (e *apiError) Error() string { return e.message }

// invalid is a request that cannot be served as it is.
func invalid(param, message string) *apiError {
	return &apiError{status: http.StatusBadRequest, kind: "invalid_request_error", param: param, message: message}
}

// unavailable says that nobody could serve a request.
func unavailable(status int, code, message string) *apiError {
	return &apiError{status: status, kind: "server_error", code: code, message: message, retryAfter: "1"}
}

// write answers with the error.
func (e *apiError) write(w http.ResponseWriter) {
	h := w.Header()
	if e.relayed != nil {
		h.Set("Content-Type", e.relayed.contentType)
		w.WriteHeader(e.relayed.status)
		_, _ = w.Write(e.relayed.body) // who asked may have gone
		return
	}
	if e.retryAfter != "" {
		h.Set("Retry-After", e.retryAfter)
	}
	v := map[string]any{"message": e.message, "type": e.kind, "param": orNull(e.param), "code": orNull(e.code)}
	if e.reason != "" {
		v["reason"], v["stage"] = e.reason, e.stage
	}
	writeJSON(w, e.status, map[string]any{"error": v})
}

func orNull(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // who asked may have gone
}
