// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
)

// maxScrapes are served at the same time; they take turns anyway.
const maxScrapes = 4

// registry has nothing but the collector.
func registry(c *Collector) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	return r
}

// Handler serves the collector's metrics, in the text format or in the one that the
// scraper prefers. More than four scrapes at a time are refused with code 503.
func Handler(c *Collector) http.Handler {
	return promhttp.HandlerFor(registry(c), promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(c.log.Handler(), slog.LevelError),
		ErrorHandling:       promhttp.ContinueOnError,
		MaxRequestsInFlight: maxScrapes,
	})
}

// Write collects once and writes the metrics in the text format. Errors are those of
// dispatch.List, after what could be read was written.
func Write(w io.Writer, c *Collector) error {
	families, err := registry(c).Gather()
	if err != nil {
		return fmt.Errorf("collect metrics: %w", err)
	}
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(w, f); err != nil {
			return fmt.Errorf("write metrics: %w", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.listing
}
