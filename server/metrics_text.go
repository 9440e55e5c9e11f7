package server

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"
)

// writeFamily writes one metric family in Prometheus' text format 0.0.4
// (https://prometheus.io/docs/instrumenting/exposition_formats/).
func writeFamily(w io.Writer, family *dto.MetricFamily) error {
	var b bytes.Buffer
	name := family.GetName()
	fmt.Fprintf(&b, "# HELP %s %s\n", name, helpEscapes.Replace(family.GetHelp()))
	fmt.Fprintf(&b, "# TYPE %s %s\n", name, strings.ToLower(family.GetType().String()))
	for _, metric := range family.GetMetric() {
		switch {
		case metric.GetCounter() != nil:
			writeSample(&b, name, metric, "", "", metric.GetCounter().GetValue())
		case metric.GetGauge() != nil:
			writeSample(&b, name, metric, "", "", metric.GetGauge().GetValue())
		case metric.GetUntyped() != nil:
			writeSample(&b, name, metric, "", "", metric.GetUntyped().GetValue())
		case metric.GetSummary() != nil:
			summary := metric.GetSummary()
			for _, q := range summary.GetQuantile() {
				writeSample(&b, name, metric, "quantile", formatFloat(q.GetQuantile()), q.GetValue())
			}
			writeSample(&b, name+"_sum", metric, "", "", summary.GetSampleSum())
			writeSample(&b, name+"_count", metric, "", "", float64(summary.GetSampleCount()))
		case metric.GetHistogram() != nil:
			histogram := metric.GetHistogram()
			for _, bucket := range histogram.GetBucket() {
				writeSample(&b, name+"_bucket", metric, "le", formatFloat(bucket.GetUpperBound()), float64(bucket.GetCumulativeCount()))
			}
			count := float64(histogram.GetSampleCount())
			writeSample(&b, name+"_bucket", metric, "le", "+Inf", count)
			writeSample(&b, name+"_sum", metric, "", "", histogram.GetSampleSum())
			writeSample(&b, name+"_count", metric, "", "", count)
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// The characters that the format escapes in help texts and in label values.
var (
	helpEscapes  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// writeSample writes one line, with one more label unless extra is empty.
func writeSample(b *bytes.Buffer, name string, metric *dto.Metric, extra, extraValue string, value float64) {
	b.WriteString(name)
	separator := byte('{')
	label := func(name, value string) {
		b.WriteByte(separator)
		separator = ','
		b.WriteString(name)
		b.WriteString(`="`)
		b.WriteString(labelEscapes.Replace(value))
		b.WriteByte('"')
	}
	for _, pair := range metric.GetLabel() {
		label(pair.GetName(), pair.GetValue())
	}
	if extra != "" {
		label(extra, extraValue)
	}
	if separator == ',' {
		b.WriteByte('}')
	}
	b.WriteByte(' ')
	b.WriteString(formatFloat(value))
	b.WriteByte('\n')
}

// formatFloat writes a number as the format wants it.
func formatFloat(v float64) string {
	switch {
	case math.IsInf(v, 1):
		return "+Inf"
	case math.IsInf(v, -1):
		return "-Inf"
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
