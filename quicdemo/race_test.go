// SPDX-License-Identifier: Apache-2.0

//go:build race

package quicdemo

// underRace is set where the race detector watches. quic-go v0.65 has a race
// of its own there: a stream that a client opens in early data reads the
// transport parameters that the handshake replaces meanwhile.
const underRace = true
