// Package source follows the events of serving engines and pools, and applies them to a [conductor.Index].
//
// A [Manager] has one goroutine for each registered [Service], which subscribes to the engine, sees that none of its batches
// is lost or counted twice, and says what is known of it when something goes wrong. An engine's batches are numbered from 0 in
// each of its processes, and nothing else tells one process from the next. So:
//
//   - A gap in the numbers is asked for at the engine's replay socket, and what comes from there has to be without gaps, too.
//     If it cannot be had the source is stale: what was known of it is dropped, and it goes on with what comes. A batch that
//     begins with a clear of everything makes up for whatever went before it.
//   - A number that was there before means that the engine has been restarted: its epoch is another one, and what was known of
//     it is dropped. So that a restarted engine that is as far as the old one was is told from it, a replay begins with the last
//     batch that is known, which has to be the same. Without a replay socket such an engine cannot be told.
//   - What is known of an engine that cannot be reached stays for a while, and is dropped then. One that comes back in time goes
//     on where it was, by replay.
//
// [Manager.Save] keeps what is known and up to where, so that a conductor that is restarted, or a second one, begins warm.
package source
