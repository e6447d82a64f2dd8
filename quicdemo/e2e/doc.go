// SPDX-License-Identifier: Apache-2.0

// Package e2e holds tests of whole programs: quicdemo serve as real processes
// that upgrade themselves, and clients that know nothing of Instar: gtlsclient
// of ngtcp2, headless Chromium, and quicdemo load. A client that is not
// installed skips its tests.
package e2e
