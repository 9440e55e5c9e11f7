// Package service is the conductor as a process: it follows publishers of events, keeps what they tell in an index, and answers
// routers over HTTP which engine holds how much of a prompt, and which is to serve it. openapi.json describes the requests; those
// that other conductors have, too, are as theirs.
//
// A tenant sees its own blocks, engines and requests, and nothing of others. With tokens configured, who asks is known by a bearer
// token; without, everybody may ask for every tenant.
package service
